"""Computes the parts of the time to a request's first token, and of the time from there to its second, from its spans.

Owns: the arithmetic. Never: reading or drawing. None stands for "the trace does not say".
"""

from __future__ import annotations

import dataclasses

from services.cli.trace_reader import RecordedRequest, SpanRecord
from services.rpc.names import Attr, Event, Span


@dataclasses.dataclass(frozen=True)
class FirstToken:
    """Divides the milliseconds to the first token; the parts and `rest_ms` (placing, messages, detokenising) make up
    the total."""

    total_ms: float | None
    queue_ms: float
    tokenize_ms: float
    prefill_wait_ms: float
    prefill_compute_ms: float
    rest_ms: float | None


@dataclasses.dataclass(frozen=True)
class SecondToken:
    """Divides the milliseconds from the first token's computation to the second's.

    The overlapped part of the transfer ran beside prefill and costs nothing; the other parts and `rest_ms` make up the
    total.
    """

    total_ms: float | None
    transfer_overlapped_ms: float | None
    # The handoff waited for a decode worker: from the prompt's end to the start of the transfer.
    handoff_wait_ms: float
    transfer_exposed_ms: float | None
    decode_wait_ms: float
    first_step_ms: float | None
    rest_ms: float | None


@dataclasses.dataclass(frozen=True)
class TransferSummary:
    bytes: int | None
    blocks: int | None
    blocks_not_moved: int | None
    transport: str | None


@dataclasses.dataclass(frozen=True)
class Breakdown:
    first_token: FirstToken
    second_token: SecondToken | None
    transfer: TransferSummary | None


def break_down(request: RecordedRequest) -> Breakdown:
    transfer = _last(request, Span.KV_TRANSFER)
    return Breakdown(
        _first_token(request),
        _second_token(request, transfer),
        None
        if transfer is None
        else TransferSummary(
            transfer.attributes.get(Attr.TRANSFER_BYTES),
            transfer.attributes.get(Attr.TRANSFER_BLOCKS),
            transfer.attributes.get(Attr.TRANSFER_BLOCKS_NOT_MOVED),
            transfer.attributes.get(Attr.TRANSFER_TRANSPORT),
        ),
    )


def _first_token(request: RecordedRequest) -> FirstToken:
    at_ns = _first_token_ns(request)

    def until(name: str) -> float:
        """Returns the milliseconds in spans of that name before the first token; those of retries are added."""
        limit = at_ns if at_ns is not None else request.end_ns
        return sum(max(0, min(span.end_ns, limit) - span.start_ns) for span in request.named(name)) / 1e6

    queue, tokenize, wait, compute = map(until, (Span.QUEUE, Span.TOKENIZE, Span.PREFILL_WAIT, Span.PREFILL_COMPUTE))
    total = None if at_ns is None else (at_ns - request.start_ns) / 1e6
    rest = None if total is None else max(0.0, total - queue - tokenize - wait - compute)
    return FirstToken(total, queue, tokenize, wait, compute, rest)


def _first_token_ns(request: RecordedRequest) -> int | None:
    if request.root is None:
        return None
    for event in request.root.events:
        if event.name == Event.FIRST_TOKEN:
            return event.at_ns
    ttft_ms = request.root.attributes.get(Attr.TTFT_MS)
    return None if ttft_ms is None else request.root.start_ns + round(ttft_ms * 1e6)


def _second_token(request: RecordedRequest, transfer: SpanRecord | None) -> SecondToken | None:
    compute, run = _last(request, Span.PREFILL_COMPUTE), _first(request, Span.DECODE_RUN)
    if run is None:
        return None
    about = transfer.attributes if transfer else {}
    overlapped, exposed = about.get(Attr.TRANSFER_OVERLAPPED_MS), about.get(Attr.TRANSFER_EXPOSED_MS)
    # Replays after the second token do not count: only what led to the first decode.run does.
    waits = sum(span.duration_ms for span in request.named(Span.DECODE_WAIT) if span.end_ns <= run.end_ns)
    parked = max(0, transfer.start_ns - compute.end_ns) / 1e6 if transfer and compute else 0.0
    step = run.attributes.get(Attr.FIRST_STEP_MS)
    total = rest = None
    if compute is not None and step is not None:
        total = (run.start_ns - compute.end_ns) / 1e6 + step
        rest = max(0.0, total - parked - (exposed or 0.0) - waits - step)
    return SecondToken(total, overlapped, parked, exposed, waits, step, rest)


def _first(request: RecordedRequest, name: str) -> SpanRecord | None:
    return next(iter(request.named(name)), None)


def _last(request: RecordedRequest, name: str) -> SpanRecord | None:
    """Returns the newest span of that name that led to the first decode.run, or the newest one if none did."""
    run = _first(request, Span.DECODE_RUN)
    spans = request.named(name)
    led = [span for span in spans if run is None or span.start_ns <= run.start_ns] or spans
    return led[-1] if led else None
