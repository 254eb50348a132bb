"""A request's story, as spans and as a summary. Pure: reads the record, writes nothing."""

from __future__ import annotations

from services.router.coordinator.actions import Stage, StageEnded, Summary
from services.router.coordinator.requests import PlacedLeg, Request


def leg_stage(request: Request, stage: Stage, leg: PlacedLeg, now: float, outcome: str) -> StageEnded:
    return StageEnded(request.request_id, stage, leg.leg, leg.worker.worker_id, leg.attempt, leg.sent_s, now, outcome)


def queue_stage(request: Request, now: float, *, outcome: str) -> StageEnded:
    attempt = request.num_retries + 1
    return StageEnded(request.request_id, Stage.QUEUE, 0, "", attempt, request.phase_since_s, now, outcome)


def place_stage(request: Request, started_s: float, now: float, outcome: str) -> StageEnded:
    num_refusals = sum(refusal.count for refusal in request.refusals.values())
    return StageEnded(
        request.request_id,
        Stage.PLACE,
        0,
        request.decode_worker,
        max(1, request.num_prefills),
        started_s,
        now,
        outcome,
        num_refusals,
    )


def summary(request: Request, now: float) -> Summary:
    return Summary(
        num_output_tokens=len(request.output),
        cached_tokens=request.cached_tokens,
        prefill_worker=request.prefill_worker,
        decode_worker=request.decode_worker,
        num_retries=request.num_retries,
        queue_s=request.queued_s,
        ttft_s=None if request.first_token_s is None else request.first_token_s - request.arrived_s,
        total_s=now - request.arrived_s,
        prefill_wait_s=request.prefill_wait_s,
        prefill_compute_s=request.prefill_compute_s,
        worker_timings=tuple(request.worker_timings),
    )
