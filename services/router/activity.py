"""Makes a router's activity line: the pace of requests, where they are, and how many workers are ready."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from services.core.clock import Clock
from services.router.catalogue import Catalogue
from services.router.coordinator import Coordinator
from services.router.coordinator.request import Phase
from services.router.coordinator.workers import WorkerState
from services.router.telemetry.request_metrics import RequestMetrics
from services.rpc.activity import ActivityLog

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


def read(coordinators: Sequence[Coordinator], requests: RequestMetrics) -> RouterFigures:
    phases = sum((coordinator.phases() for coordinator in coordinators), Counter[Phase]())
    workers = [worker for coordinator in coordinators for worker in coordinator.workers()]
    return RouterFigures(
        accepted=requests.num_accepted,
        ended=requests.num_ended,
        output_tokens=requests.num_output_tokens,
        queued=phases[Phase.QUEUED],
        running=phases.total() - phases[Phase.QUEUED],
        workers_ready=sum(worker.state is WorkerState.READY for worker in workers),
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
    def figures() -> RouterFigures:
        return read([model.conductor.coordinator for model in catalogue.all()], requests)

    return ActivityLog(figures, say, clock, interval_s)
