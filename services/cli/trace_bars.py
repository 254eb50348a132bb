"""Makes the bars of a recorded request's waterfall from its spans, in the form of the console's. The module is pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.cli.trace_reader import RecordedRequest, SpanRecord
from services.router.console.bars import Bar, kind_of
from services.rpc.names import Attr, Event, Span

_AFTER_QUEUE = ("prefilling", "binding")
"""What routers said in earlier traces of a queue that a request has left for a worker."""
_MOST_BARS, _MOST_EVENTS = 500, 500
_DEEPEST = 2
_EXACT = 1 << 53
"""Larger whole numbers lose digits in a browser."""


def bars_of(request: RecordedRequest) -> list[Bar]:
    """Returns a bar for each span, parents before children, at most some hundred, with as many events each.

    A transfer that does not say when it was sealed has two: for the part that ran beside the prefill, and for the rest.
    """
    return [bar for depth, span in request.tree()[:_MOST_BARS] for bar in _bars(request, depth, span)]


def readable(value: Any) -> Any:
    """Returns the value with text instead of numbers that browsers do not read, or read as others."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) >= _EXACT:
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): readable(part) for name, part in value.items()}
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value
    return [readable(part) for part in value]


def _bars(request: RecordedRequest, depth: int, span: SpanRecord) -> list[Bar]:
    def ms(at_ns: int) -> float:
        return (at_ns - request.start_ns) / 1e6

    whole = Bar(
        span.name,
        min(depth, _DEEPEST),
        ms(span.start_ns),
        ms(span.end_ns),
        kind_of(span.name),
        str(span.attributes.get(Attr.WORKER) or span.instance or span.service),
        _outcome(span),
        attributes=span.attributes,
        events=tuple({"name": event.name, "at_ms": ms(event.at_ns)} for event in span.events[:_MOST_EVENTS]),
    )
    overlapped = span.attributes.get(Attr.TRANSFER_OVERLAPPED_MS)
    is_sealed = any(event.name == Event.SEALED for event in span.events)
    if span.name != Span.KV_TRANSFER or is_sealed or not isinstance(overlapped, int | float) or not overlapped > 0:
        return [whole]
    sealed_ms = min(whole.start_ms + overlapped, ms(span.end_ns))
    hidden = replace(whole, end_ms=sealed_ms, hidden=True, outcome="", attributes={}, events=())
    return [hidden, replace(whole, start_ms=sealed_ms)]


def _outcome(span: SpanRecord) -> str:
    if span.failed:
        return str(span.attributes.get(Attr.ERROR_TYPE) or span.message or "error")
    if span.name == Span.REQUEST:
        reasons = span.attributes.get(Attr.FINISH_REASONS, ())
        return ",".join(map(str, reasons)) if isinstance(reasons, list) else str(reasons or "")
    outcome = str(span.attributes.get(Attr.OUTCOME, ""))
    return "done" if span.name == Span.QUEUE and outcome in _AFTER_QUEUE else outcome
