"""Makes a worker's activity line: the pace of both phases, running and waiting sequences, and the pool's use."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from services.engine.worker_engine import WorkerEngine
from services.rpc.activity_log import ActivityLog
from services.worker.host import WorkerHost

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """Keeps the figures of one activity line. The first four are counts since the start."""

    prefill_tokens: int
    sampled_tokens: int
    prefix_tokens_queried: int
    prefix_tokens_hit: int
    running: int
    waiting: int
    kv_used: float
    """The share of the pool's blocks that are neither free nor cached."""


def read(engine: WorkerEngine) -> WorkerFigures:
    stats = engine.stats()
    ledger = stats.ledger
    return WorkerFigures(
        prefill_tokens=engine.tally.prefill_tokens,
        sampled_tokens=engine.tally.sampled_tokens,
        prefix_tokens_queried=stats.prefix_tokens_queried,
        prefix_tokens_hit=stats.prefix_tokens_hit,
        running=stats.num_running,
        waiting=stats.num_waiting,
        kv_used=(ledger.importing + ledger.leased + ledger.active) / ledger.total,
    )


def say(before: WorkerFigures, now: WorkerFigures, seconds: float) -> None:
    queried = now.prefix_tokens_queried - before.prefix_tokens_queried
    hit = now.prefix_tokens_hit - before.prefix_tokens_hit
    log.info(
        "last %.0f s: %.1f prefill tokens/s, %.1f output tokens/s, %d running, %d waiting, KV %.1f%%, prefix hits %s",
        seconds,
        (now.prefill_tokens - before.prefill_tokens) / seconds,
        (now.sampled_tokens - before.sampled_tokens) / seconds,
        now.running,
        now.waiting,
        100 * now.kv_used,
        f"{hit / queried:.0%}" if queried else "-",
    )


def activity_log(host: WorkerHost) -> ActivityLog[WorkerFigures]:
    return ActivityLog(lambda: read(host.engine), say, host.clock, host.config.log_interval_s)
