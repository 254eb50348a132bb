"""Makes spans of a request's timeline as a router tells it, so that it is drawn as a trace is.

Owns: which bar is which span. Never: drawing, or where a worker's part stands, which is the router's layout
(`services/router/console/bars.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from baton.v1 import control_pb2
from services.cli.trace_reader import RecordedRequest, SpanEvent, SpanRecord
from services.router.console.bars import Bar, bars_of, whole
from services.router.telemetry.slo import SUCCEEDED
from services.router.telemetry.timelines import Timeline, TimelineStage, TokenTimes
from services.rpc.names import Attr, Event, Span
from services.rpc.plain import enum_word

_NEVER_RAN = "refused"
"""The outcome of a leg that has no span in a trace either."""


def as_recorded(message: control_pb2.Timeline, arrived_ns: int, elapsed_us: int) -> RecordedRequest:
    """Returns the request. It arrived at `arrived_ns` (Unix), and has existed for `elapsed_us` microseconds, which is
    where that ends which goes on."""
    timeline, ended = _timeline(message), message.phase == control_pb2.REQUEST_PHASE_ENDED
    total_ms = max(0, message.total_us if message.HasField("total_us") else elapsed_us) / 1e3
    stages = [stage for stage in timeline.stages if stage.outcome != _NEVER_RAN]
    spans = list(_spans(whole(bars_of(timeline, stages)), message, arrived_ns, total_ms))
    phase = enum_word(control_pb2.RequestPhase.DESCRIPTOR, message.phase)
    attributes: dict[str, Any] = {
        Attr.REQUEST_MODEL: message.model,
        Attr.INPUT_TOKENS: message.prompt_tokens,
        Attr.OUTPUT_TOKENS: message.output_tokens,
        Attr.CACHE_READ_INPUT_TOKENS: message.cached_tokens,
        # Of one that lives, its phase stands where its end will.
        Attr.FINISH_REASONS: [message.outcome if ended else phase],
        Attr.ERROR_TYPE: message.outcome,
    }
    spans[0].attributes.update(attributes)
    return RecordedRequest(message.request_id, message.trace_id, spans[0], tuple(spans))


def has_failed(leg: int, outcome: str) -> bool:
    """Returns whether a stage is a leg that came to nothing."""
    return bool(leg) and outcome not in ("", "done")


def _timeline(message: control_pb2.Timeline) -> Timeline:
    """Returns the timeline as the router has it, in seconds from the request's arrival."""
    first_s = message.ttft_us / 1e6 if message.HasField("ttft_us") else None
    return Timeline(
        message.number,
        message.request_id,
        message.model,
        arrived_s=0.0,
        times=TokenTimes(message.output_tokens, first_s),
        trace_id=message.trace_id,
        prefill_worker=message.prefill_worker,
        decode_worker=message.decode_worker,
        ended_s=message.total_us / 1e6 if message.HasField("total_us") else None,
        outcome=message.outcome,
        failure=message.failure,
        timings=message.timings if message.HasField("timings") else None,
        stages=[
            TimelineStage(
                stage.name,
                stage.start_us / 1e6,
                stage.end_us / 1e6 if stage.HasField("end_us") else None,
                stage.worker_id,
                stage.leg,
                stage.attempt,
                stage.outcome,
            )
            for stage in message.stages
        ],
    )


def _spans(bars: list[Bar], message: control_pb2.Timeline, arrived_ns: int, total_ms: float) -> Iterator[SpanRecord]:
    """Yields a span for each bar, within the request's time. The first is the root."""
    parents = [""]

    def at_ns(ms: float) -> int:
        return arrived_ns + round(min(max(0.0, ms), total_ms) * 1e6)

    for number, bar in enumerate(bars):
        del parents[bar.depth + 1 :]
        start_ns = at_ns(bar.start_ms)
        events = [SpanEvent(event["name"], at_ns(event["at_ms"]), {}) for event in bar.events]
        attributes: dict[str, Any] = {Attr.WORKER: bar.worker, Attr.OUTCOME: bar.outcome}
        attributes |= bar.attributes
        end_ns = max(start_ns, at_ns(total_ms if bar.end_ms is None else bar.end_ms))
        if bar.kind == "transfer":  # of one that goes on, what was hidden is known
            sealed_ns = events[0].at_ns if events else end_ns if bar.hidden else start_ns
            attributes.setdefault(Attr.TRANSFER_EXPOSED_MS, (end_ns - sealed_ns) / 1e6)
        if not bar.depth:
            events += [
                SpanEvent(Event.RETRY, at_ns(stage.start_us / 1e3), {Attr.ATTEMPT: stage.attempt})
                for stage in message.stages
                if stage.name == Span.QUEUE and stage.attempt > 1
            ]
            failed = message.phase == control_pb2.REQUEST_PHASE_ENDED and message.outcome not in SUCCEEDED
        else:
            failed = has_failed(bar.attributes.get(Attr.LEG, 0), bar.outcome)
        yield SpanRecord(
            name=bar.name,
            trace_id=message.trace_id,
            span_id=f"span {number}",
            parent_id=parents[-1],
            service="router",
            instance="",
            start_ns=start_ns,
            end_ns=end_ns,
            attributes=attributes,
            events=tuple(events),
            failed=failed,
            message=message.failure,
        )
        parents.append(f"span {number}")
