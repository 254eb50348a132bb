"""What makes a worker a good choice: scores in [0, 1] and their weights. Pure.

A new criterion is one more `Term` in `PolicyConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.router.policy.views import Job, Role, Source, WorkerView

Term = Callable[[WorkerView, Job, Source | None, float], float]
"""(worker, job, source of the handoff if there is one, now) -> score in [0, 1]; higher is better."""

_WAIT_SCALE_MS = 500.0
_GUESSED_MS_PER_PREFILL_TOKEN = 0.5


def short_queue(worker: WorkerView, job: Job, source: Source | None, now: float) -> float:
    """Falls with the time until this prompt's turn: half at half a second."""
    wait_ms = worker.queued_tokens * (worker.load.ms_per_prefill_token or _GUESSED_MS_PER_PREFILL_TOKEN)
    return 1.0 / (1.0 + wait_ms / _WAIT_SCALE_MS)


def free_memory(worker: WorkerView, job: Job, source: Source | None, now: float) -> float:
    """Share of the pool still available with the job in it."""
    left = worker.available_blocks - worker.blocks_for(job.num_tokens)
    return max(0.0, left / worker.num_blocks)


def small_batch(worker: WorkerView, job: Job, source: Source | None, now: float) -> float:
    return max(0.0, 1.0 - worker.num_sequences / worker.max_num_seqs)


def dedicated(worker: WorkerView, job: Job, source: Source | None, now: float) -> float:
    """A mixed worker disturbs its other phase; prefer one that has none."""
    return 0.0 if worker.role is Role.MIXED else 1.0


def near(worker: WorkerView, job: Job, source: Source | None, now: float) -> float:
    """1 in place (no byte moves), 0.5 on the same host (shared memory), 0 elsewhere."""
    if source is None or worker.worker_id == source.worker_id:
        return 1.0
    return 0.5 if worker.host_id == source.host_id else 0.0


def trusted(worker: WorkerView, job: Job, source: Source | None, now: float) -> float:
    """Grows after a failure, and in the slow start of a worker that was down."""
    return 1.0 if worker.ramp is None else worker.ramp.at(now)


@dataclass(frozen=True)
class PolicyConfig:
    max_queued_tokens: int = 8192
    """A prefill worker is given no further prompt while more tokens than this wait there: what waits in the router
    keeps its priority and its choice of worker."""
    prefill_terms: tuple[tuple[float, Term], ...] = (
        (4.0, short_queue),
        (1.0, free_memory),
        (1.0, small_batch),
        (2.0, dedicated),
        (4.0, trusted),
    )
    decode_terms: tuple[tuple[float, Term], ...] = (
        (4.0, dedicated),
        (2.0, free_memory),
        (2.0, small_batch),
        (1.0, near),
        (4.0, trusted),
    )
