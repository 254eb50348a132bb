"""Lays out where one request spent its time, as bars of a waterfall, and as spans of OTLP. Pure.

The router knows when its stages begin and end; of what happens inside a worker it has durations. Workers' bars are
placed by them: a prompt's from the beginning of its leg, the transfer's around the end of the prompt, which is when its
exposed part begins, and decoding's from the end of its leg. With several attempts, these are of the last. Until a
request has succeeded it has none of them but a transfer.

Owns: the layout. Never: drawing, or what is remembered (`telemetry/timelines.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from baton.v1 import types_pb2
from services.router.telemetry.timelines import Timeline, TimelineStage
from services.rpc.names import Attr, Event, Span
from services.rpc.plain import enum_word

_KINDS = {
    Span.PREFILL: "prefill",
    Span.PREFILL_WAIT: "prefill",
    Span.PREFILL_COMPUTE: "prefill",
    Span.KV_TRANSFER: "transfer",
    Span.DECODE: "decode",
    Span.DECODE_WAIT: "decode",
    Span.DECODE_RUN: "decode",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """Holds one bar. Times are milliseconds from the request's arrival."""

    name: str
    depth: int
    start_ms: float
    end_ms: float | None
    """None while it goes on."""
    kind: str
    """One of router, prefill, transfer and decode."""
    worker: str = ""
    outcome: str = ""
    hidden: bool = False
    """Whether something else that had to be done went on at the same time."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """By the names of spans' attributes."""
    events: tuple[dict[str, Any], ...] = ()

    def row(self) -> dict[str, Any]:
        return asdict(self)


def kind_of(name: str) -> str:
    """Returns the kind of a bar by its span's name."""
    return _KINDS.get(name, "router")


def bars_of(timeline: Timeline, stages: Sequence[TimelineStage]) -> list[Bar]:
    """Returns the bars, each before those that are part of it. `stages` are those of the request, in the order of their
    beginnings, with the one that goes on."""
    arrived_s, first_s = timeline.arrived_s, timeline.times.first_s
    total_ms = None if timeline.ended_s is None else _ms(timeline.ended_s - arrived_s)
    events = () if first_s is None else ({"name": Event.FIRST_TOKEN, "at_ms": _ms(first_s - arrived_s)},)
    root = Bar(
        Span.REQUEST,
        0,
        0.0,
        total_ms,
        "router",
        outcome=timeline.outcome,
        attributes=_about(timeline),
        events=events,
    )
    last = {stage.name: stage for stage in stages}
    found = [root]
    for stage in stages:
        found.append(_bar(stage, arrived_s))
        if timeline.timings is not None and last[stage.name] is stage:
            found += _inside(found[-1], timeline, timeline.timings, "prefill" in last)
        elif stage.name == "decode" and stage.ended_s is None:
            found += _under_way(found[-1], timeline, last)
    return found


def _about(timeline: Timeline) -> dict[str, Any]:
    found: dict[str, Any] = {
        Attr.RESPONSE_MODEL: timeline.model,
        Attr.INPUT_TOKENS: timeline.prompt_tokens,
        Attr.CACHE_READ_INPUT_TOKENS: timeline.cached_tokens,
        Attr.OUTPUT_TOKENS: timeline.times.num_tokens,
        Attr.PREFILL_WORKER: timeline.prefill_worker,
        Attr.DECODE_WORKER: timeline.decode_worker,
        Attr.RETRIES: timeline.num_retries,
        Attr.PRIORITY: timeline.priority,
    }
    if timeline.outcome:
        found[Attr.FINISH_REASONS] = [timeline.outcome]
    if timeline.times.first_s is not None:
        found[Attr.TTFT_MS] = _ms(timeline.times.first_s - timeline.arrived_s)
    return found


def _bar(stage: TimelineStage, arrived_s: float) -> Bar:
    end_ms = None if stage.ended_s is None else _ms(stage.ended_s - arrived_s)
    attributes: dict[str, Any] = {Attr.ATTEMPT: stage.attempt}
    if stage.leg:
        attributes[Attr.LEG] = stage.leg
    start_ms = _ms(stage.started_s - arrived_s)
    return Bar(
        stage.name, 1, start_ms, end_ms, kind_of(stage.name), stage.worker_id, stage.outcome, attributes=attributes
    )


def _inside(bar: Bar, timeline: Timeline, timings: types_pb2.PhaseTimings, split: bool) -> list[Bar]:
    """Returns what the worker measured inside a leg."""
    if bar.name == "prefill" or (bar.name == "decode" and not split):
        found = _prompt(bar, timings)
    elif bar.name == "decode":
        found = _transfer(bar, timeline, timings)
    else:
        return []
    return found + _decoding(bar, timings) if bar.name == "decode" else found


def _prompt(bar: Bar, timings: types_pb2.PhaseTimings) -> list[Bar]:
    begins_ms = bar.start_ms + timings.prefill_wait_ms
    ends_ms = begins_ms + timings.prefill_compute_ms
    return [
        Bar(Span.PREFILL_WAIT, 2, bar.start_ms, begins_ms, "prefill", bar.worker),
        Bar(Span.PREFILL_COMPUTE, 2, begins_ms, ends_ms, "prefill", bar.worker),
    ]


def _transfer(bar: Bar, timeline: Timeline, timings: types_pb2.PhaseTimings) -> list[Bar]:
    if not timings.HasField("transfer_ms") or timeline.prefill_worker == timeline.decode_worker:
        return []
    # A prompt that was handed over once more was done before the leg began.
    sealed_ms = max(_sealed_ms(timeline, timings, bar), bar.start_ms + timings.transfer_overlapped_ms)
    attributes: dict[str, Any] = {
        Attr.TRANSFER_BYTES: timings.transfer_bytes,
        Attr.TRANSFER_BLOCKS: timings.transfer_blocks,
        Attr.TRANSFER_OVERLAPPED_MS: timings.transfer_overlapped_ms,
        Attr.TRANSFER_EXPOSED_MS: timings.transfer_exposed_ms,
    }
    if timings.HasField("transport"):
        attributes[Attr.TRANSFER_TRANSPORT] = enum_word(types_pb2.Transport.DESCRIPTOR, timings.transport)
    hidden_ms = min(timings.transfer_overlapped_ms, sealed_ms)
    part = Bar(Span.KV_TRANSFER, 2, sealed_ms, None, "transfer", bar.worker, attributes=attributes)
    return [
        replace(part, start_ms=sealed_ms - hidden_ms, end_ms=sealed_ms, hidden=True),
        replace(part, start_ms=sealed_ms, end_ms=sealed_ms + timings.transfer_exposed_ms),
    ]


def _under_way(bar: Bar, timeline: Timeline, last: Mapping[str, TimelineStage]) -> list[Bar]:
    """Returns the transfer as far as the router knows it before anything is measured: since when the decode worker has
    admitted the request, until when the prompt hid it, and that it is over once there is a token after the first."""
    prefill, admitted_ms = last.get("prefill"), _end_ms(last.get("place"), timeline)
    if prefill is None or prefill.worker_id == bar.worker or admitted_ms is None or admitted_ms < bar.start_ms:
        return []
    sealed_ms = _end_ms(prefill, timeline)
    part = Bar(Span.KV_TRANSFER, 2, admitted_ms, sealed_ms, "transfer", bar.worker, hidden=True)
    found = [part] if sealed_ms is None or admitted_ms < sealed_ms else []
    if sealed_ms is not None and timeline.times.num_tokens < 2:
        found.append(replace(part, start_ms=max(admitted_ms, sealed_ms), end_ms=None, hidden=False))
    return found


def _end_ms(stage: TimelineStage | None, timeline: Timeline) -> float | None:
    return None if stage is None or stage.ended_s is None else _ms(stage.ended_s - timeline.arrived_s)


def _sealed_ms(timeline: Timeline, timings: types_pb2.PhaseTimings, bar: Bar) -> float:
    """Returns when the prompt was computed, as far as is known."""
    for stage in reversed(timeline.stages):
        if stage.name == "prefill":
            started_ms = _ms(stage.started_s - timeline.arrived_s)
            return started_ms + timings.prefill_wait_ms + timings.prefill_compute_ms
    return bar.start_ms


def _decoding(bar: Bar, timings: types_pb2.PhaseTimings) -> list[Bar]:
    if bar.end_ms is None or not timings.HasField("decode_run_ms"):
        return []
    begins_ms = max(bar.start_ms, bar.end_ms - timings.decode_run_ms)
    found = [Bar(Span.DECODE_RUN, 2, begins_ms, bar.end_ms, "decode", bar.worker)]
    if timings.HasField("decode_wait_ms"):
        since_ms = max(bar.start_ms, begins_ms - timings.decode_wait_ms)
        found.insert(0, Bar(Span.DECODE_WAIT, 2, since_ms, begins_ms, "decode", bar.worker))
    return found


def otlp_of(timeline: Timeline, bars: Sequence[Bar], arrived_unix_s: float) -> dict[str, Any]:
    """Returns the bars as a document of OTLP JSON, which trace viewers open. What goes on is left out,
    and of a transfer that is measured only at the end what is known by now.

    The trace has the request's own id if it is traced. The ids of spans are made of the request's number, so that the
    same request has the same ones whenever it is asked for.
    """
    seed = f"{timeline.label}\0{timeline.number}\0{arrived_unix_s:.0f}".encode()
    trace_id = timeline.trace_id or hashlib.blake2b(seed, digest_size=16).hexdigest()
    spans, parents = [], [""]
    for index, bar in enumerate(whole(bars)):
        span_id = hashlib.blake2b(seed + b"\0%d" % index, digest_size=8).hexdigest()
        del parents[bar.depth + 1 :]
        if bar.end_ms is not None and not bar.hidden:
            spans.append(_span(timeline, bar, trace_id, span_id, parents[-1], arrived_unix_s))
        parents.append(span_id)
    attributes = [_attribute("service.name", "baton-router"), _attribute("service.instance.id", "router")]
    scope = {"scope": {"name": "baton.console"}, "spans": spans}
    return {"resourceSpans": [{"resource": {"attributes": attributes}, "scopeSpans": [scope]}]}


def whole(bars: Sequence[Bar]) -> list[Bar]:
    """Returns the bars with the two parts of a transfer as one, as the worker's own span has it."""
    found: list[Bar] = []
    for bar in bars:
        if bar.name == Span.KV_TRANSFER and found and found[-1].hidden:
            sealed = {"name": Event.SEALED, "at_ms": bar.start_ms}
            found[-1] = replace(bar, start_ms=found[-1].start_ms, events=(sealed,))
        else:
            found.append(bar)
    return found


def _span(
    timeline: Timeline, bar: Bar, trace_id: str, span_id: str, parent_id: str, arrived_unix_s: float
) -> dict[str, Any]:
    assert bar.end_ms is not None
    named: dict[str, Any] = {Attr.REQUEST_ID: timeline.label, Attr.WORKER: bar.worker, Attr.OUTCOME: bar.outcome}
    named |= bar.attributes
    span: dict[str, Any] = {
        "traceId": trace_id,
        "spanId": span_id,
        "name": bar.name,
        "kind": 1 if bar.depth else 2,
        "startTimeUnixNano": str(_ns(arrived_unix_s, bar.start_ms)),
        "endTimeUnixNano": str(_ns(arrived_unix_s, bar.end_ms)),
        "attributes": [_attribute(name, value) for name, value in named.items() if value != ""],
        "events": [
            {"name": event["name"], "timeUnixNano": str(_ns(arrived_unix_s, event["at_ms"]))} for event in bar.events
        ],
    }
    if parent_id:
        span["parentSpanId"] = parent_id
    if not bar.depth and timeline.failure:
        span["status"] = {"code": 2, "message": timeline.failure}
    return span


def _attribute(name: str, value: str | int | float | list[str]) -> dict[str, Any]:
    return {"key": name, "value": _any_value(value)}


def _any_value(value: str | int | float | list[str]) -> dict[str, Any]:
    match value:
        case int():
            return {"intValue": str(value)}  # 64 bits are a string in JSON
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
    return {"arrayValue": {"values": [_any_value(each) for each in value]}}


def _ns(arrived_unix_s: float, ms: float) -> int:
    return round(arrived_unix_s * 1e9) + round(ms * 1e6)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
