"""Makes a router's activity line: the pace of requests, where they are, and how many workers are ready."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from baton.v1 import control_pb2
from services.core.clock import Clock
from services.router.catalogue import Catalogue
from services.router.coordinator.request import Phase
from services.router.status import state_of
from services.router.telemetry.request_metrics import RequestMetrics
from services.rpc.activity_log import ActivityLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterFigures:
    """Holds the figures of one activity line. The first three are counts since the start."""

    accepted: int
    ended: int
    output_tokens: int
    queued: int
    running: int
    workers_ready: int
    workers: int


def read(catalogue: Catalogue, requests: RequestMetrics) -> RouterFigures:
    phases = catalogue.phases()
    workers = [worker for model in catalogue.all() for worker in model.conductor.coordinator.workers.all()]
    return RouterFigures(
        accepted=requests.num_accepted,
        ended=requests.num_ended,
        output_tokens=requests.num_output_tokens,
        queued=phases[Phase.QUEUED],
        running=phases.total() - phases[Phase.QUEUED],
        workers_ready=sum(state_of(worker) == control_pb2.WORKER_STATE_READY for worker in workers),
        workers=sum(not worker.is_gone for worker in workers),
    )


def say(before: RouterFigures, now: RouterFigures, seconds: float) -> None:
    log.info(
        "last %.0f s: %.2f requests/s accepted, %.2f ended, %.1f output tokens/s, %d queued, %d running, "
        "%d of %d workers ready",
        seconds,
        (now.accepted - before.accepted) / seconds,
        (now.ended - before.ended) / seconds,
        (now.output_tokens - before.output_tokens) / seconds,
        now.queued,
        now.running,
        now.workers_ready,
        now.workers,
    )


def activity_log(
    catalogue: Catalogue, requests: RequestMetrics, clock: Clock, interval_s: float
) -> ActivityLog[RouterFigures]:
    return ActivityLog(lambda: read(catalogue, requests), say, clock, interval_s)
