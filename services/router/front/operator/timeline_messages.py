"""Writes down where requests spend their time, as ControlService tells it.

Owns: the messages. Never: what is remembered (`telemetry/timelines.py`).
"""

from __future__ import annotations

from baton.v1 import control_pb2
from services.core.errors import UnknownModel
from services.router.catalogue import Catalogue
from services.router.coordinator.request import LiveStage, Phase
from services.router.telemetry.timelines import Timeline, TimelineStage

_WAITS = {Phase.QUEUED: "queue", Phase.PARKED: "place", Phase.BINDING: "place"}
"""The stages that are reported only when they are over."""


def now_of(catalogue: Catalogue, timeline: Timeline) -> LiveStage | None:
    """Returns where the request is now; None if it has ended, or is being tokenised."""
    if not timeline.is_live:
        return None
    try:
        return catalogue.get(timeline.model).conductor.coordinator.stage_of(timeline.request_id)
    except UnknownModel:
        return None


def stages(timeline: Timeline, live: LiveStage | None) -> list[TimelineStage]:
    """Returns the request's stages in the order of their beginnings, with the wait that goes on now."""
    found = sorted(timeline.stages, key=lambda stage: stage.started_s)  # a wait is reported after the leg that ends it
    if live is not None and live.phase in _WAITS:
        found.append(TimelineStage(_WAITS[live.phase], live.since_s, attempt=live.num_retries + 1))
    return found


def phase(timeline: Timeline, live: LiveStage | None) -> str:
    """Returns the name of the phase in lower case. What is being tokenised waits, as far as its client sees."""
    if not timeline.is_live:
        return "ended"
    return live.phase.value if live is not None else Phase.QUEUED.value


def told(timeline: Timeline, live: LiveStage | None, now: float) -> control_pb2.Timeline:
    """Returns the message of a request; `live` says where it is now."""
    times, arrived_s = timeline.times, timeline.arrived_s
    return control_pb2.Timeline(
        number=timeline.number,
        request_id=timeline.label,
        model=timeline.model,
        trace_id=timeline.trace_id,
        age_us=_us(now - arrived_s),
        phase=f"REQUEST_PHASE_{phase(timeline, live).upper()}",
        prompt_tokens=timeline.prompt_tokens,
        cached_tokens=live.cached_tokens if live is not None else timeline.cached_tokens,
        output_tokens=times.num_tokens,
        max_tokens=timeline.max_tokens,
        priority=timeline.priority,
        ttft_us=None if times.first_s is None else _us(times.first_s - arrived_s),
        total_us=None if timeline.ended_s is None else _us(timeline.ended_s - arrived_s),
        tpot_us=None if times.per_token_s is None else _us(times.per_token_s),
        longest_itl_us=None if times.num_tokens < 2 else _us(times.longest_gap_s),
        prefill_worker=timeline.prefill_worker,
        decode_worker=timeline.decode_worker,
        outcome=timeline.outcome,
        failure=timeline.failure,
        num_retries=live.num_retries if live is not None else timeline.num_retries,
        stages=[_stage(each, arrived_s) for each in stages(timeline, live)],
        timings=timeline.timings,
        prompt=timeline.prompt,
        output=timeline.output,
    )


def _stage(stage: TimelineStage, arrived_s: float) -> control_pb2.TimelineStage:
    return control_pb2.TimelineStage(
        name=stage.name,
        start_us=_us(stage.started_s - arrived_s),
        end_us=None if stage.ended_s is None else _us(stage.ended_s - arrived_s),
        worker_id=stage.worker_id,
        leg=stage.leg,
        attempt=stage.attempt,
        outcome=stage.outcome,
    )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
