"""Which worker runs a prompt, and which one decodes it. Pure functions of (job, worker views, now, config).

A choice is filter (ready, compatible, room) -> score in [0, 1] -> weighted sum -> best; ties by worker id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from services.core.errors import ContextLengthExceeded
from services.router.policy.terms import PolicyConfig, Term
from services.router.policy.views import Job, Role, Source, WorkerView


def resolve_max_tokens(
    num_prompt_tokens: int, max_tokens: int | None, workers: Iterable[WorkerView], model_context_tokens: int
) -> int:
    """`max_tokens`, or what the largest pool leaves. `model_context_tokens` speaks while no worker is known.

    Raises ContextLengthExceeded if no pool could ever hold the request.
    """
    contexts = [worker.context_tokens for worker in workers if worker.role.can_decode]
    context_tokens = max(contexts, default=model_context_tokens)
    room = context_tokens - num_prompt_tokens
    if room < 1:
        asked = f"the prompt has {num_prompt_tokens}, and at most {context_tokens - 1} leave room for an output"
        raise ContextLengthExceeded.of("prompt", context_tokens, asked)
    if max_tokens is not None and max_tokens > room:
        asked = (
            f"{num_prompt_tokens + max_tokens} were asked for: {num_prompt_tokens} in the prompt, {max_tokens} after it"
        )
        raise ContextLengthExceeded.of("stopping.max_tokens", context_tokens, asked)
    return room if max_tokens is None else max_tokens


def can_prefill(job: Job, worker: WorkerView) -> bool:
    """Ever: load does not matter."""
    return worker.ready and worker.role.can_prefill and job.num_tokens < worker.context_tokens


def can_decode(job: Job, worker: WorkerView) -> bool:
    """Ever, as a whole: load does not matter."""
    return worker.ready and _fits(job, worker)


def can_take_over(job: Job, source: Source, worker: WorkerView) -> bool:
    """Ever: load does not matter. In place no block is needed; elsewhere all the prompt's blocks and one."""
    if worker.worker_id == source.worker_id:
        return (worker.ready or worker.on_trial) and _fits(job, worker)
    if not can_decode(job, worker) or worker.layout != source.layout or source.worker_id in worker.barred:
        return False
    return _import_blocks(job, worker) <= worker.num_blocks


def can_hand_over(job: Job, workers: Sequence[WorkerView]) -> bool:
    """Ever: some worker could run the prompt and some worker take it over."""
    return any(can_prefill(job, worker) and any(_takers(job, worker, workers)) for worker in workers)


def _takers(job: Job, worker: WorkerView, workers: Sequence[WorkerView]) -> Iterator[WorkerView]:
    """Who could ever take over a prompt that ran on `worker`."""
    source = Source(worker.worker_id, worker.host_id, worker.layout)
    return (decoder for decoder in workers if can_take_over(job, source, decoder))


def _unblamed(able: Sequence[WorkerView], job: Job) -> Sequence[WorkerView]:
    """Those that have not failed under this job, room or not: the one that has often looks the freest, and a job that
    went back there for want of room elsewhere would use up its attempts. All of them, if each has failed."""
    return [worker for worker in able if worker.worker_id not in job.avoid] or able


def _tried(able: Sequence[WorkerView], source: Source | None) -> Sequence[WorkerView]:
    """Those that are known to take over what runs at `source`, room or not. All of them, if none is."""
    return [worker for worker in able if source is None or source.worker_id not in worker.untried] or able


def _has_tried_taker(job: Job, worker: WorkerView, workers: Sequence[WorkerView]) -> bool:
    return any(worker.worker_id not in taker.untried for taker in _takers(job, worker, workers))


def place_prefill(
    job: Job, workers: Sequence[WorkerView], handoffs_in_flight: Sequence[int], now: float, config: PolicyConfig
) -> str | None:
    """Worker for the prompt, or None to wait.

    `handoffs_in_flight`: tokens of each handoff that no decode worker has admitted yet. A prefill starts only while
    decode room covers them and this one: a lease that nobody can take fills its prefill worker. With none in flight one
    is always let through.
    """
    able = _unblamed(
        [worker for worker in workers if can_prefill(job, worker) and any(_takers(job, worker, workers))], job
    )
    candidates = [
        worker
        for worker in [worker for worker in able if _has_tried_taker(job, worker, workers)] or able
        if _has_prefill_room(job, worker, config) and _has_decode_room(job, worker, workers, handoffs_in_flight)
    ]
    return _best(candidates, job, None, now, config.prefill_terms)


def place_decode(
    job: Job, source: Source | None, workers: Sequence[WorkerView], now: float, config: PolicyConfig
) -> str | None:
    """Worker that takes over the handoff of `source` (None: runs the whole sequence), or None to wait."""
    able = _tried(_unblamed([worker for worker in workers if _could_run(job, source, worker)], job), source)
    candidates = [worker for worker in able if _has_room_to_decode(job, source, worker)]
    return _best(candidates, job, source, now, config.decode_terms)


def nearest_to_room(job: Job, source: Source | None, workers: Sequence[WorkerView]) -> str | None:
    """The worker that could take an aged job soonest: most available blocks, whether or not they suffice."""
    candidates = [worker for worker in workers if _could_run(job, source, worker)]
    if not candidates:
        return None
    candidates = list(_tried(_unblamed(candidates, job), source))
    return min(candidates, key=lambda worker: (-worker.available_blocks, worker.worker_id)).worker_id


def _fits(job: Job, worker: WorkerView) -> bool:
    return worker.role.can_decode and job.total_tokens <= worker.context_tokens


def _has_room_to_decode(job: Job, source: Source | None, worker: WorkerView) -> bool:
    """By the newest numbers; the worker itself decides. An idle worker always has: what it caches it can evict."""
    if source is not None and worker.worker_id == source.worker_id:
        return True  # adoption in place takes no new blocks
    if worker.idle:
        return True
    return worker.available_blocks >= _import_blocks(job, worker) and worker.num_sequences < worker.max_num_seqs


def _has_prefill_room(job: Job, worker: WorkerView, config: PolicyConfig) -> bool:
    if worker.idle:
        return True
    return (
        worker.available_blocks >= worker.blocks_for(job.num_tokens) and worker.queued_tokens < config.max_queued_tokens
    )


def _has_decode_room(
    job: Job, source: WorkerView, workers: Sequence[WorkerView], handoffs_in_flight: Sequence[int]
) -> bool:
    """Could the handoff of a prefill on `source` be taken over, after those in flight?"""
    if source.role is Role.MIXED or not handoffs_in_flight:
        return True
    room = sum(decoder.load.available_blocks for decoder in _takers(job, source, workers))
    taken = sum(source.blocks_for(num_tokens) + 1 for num_tokens in handoffs_in_flight)
    return room - taken >= _import_blocks(job, source)


def _could_run(job: Job, source: Source | None, worker: WorkerView) -> bool:
    return can_decode(job, worker) if source is None else can_take_over(job, source, worker)


def _import_blocks(job: Job, worker: WorkerView) -> int:
    """What a decode worker sets aside for a handoff: its prompt's blocks and one to grow into."""
    return worker.blocks_for(job.num_tokens) + 1


def _best(
    candidates: Sequence[WorkerView],
    job: Job,
    source: Source | None,
    now: float,
    terms: Sequence[tuple[float, Term]],
) -> str | None:
    if not candidates:
        return None

    def rank(worker: WorkerView) -> tuple[float, str]:
        score = sum(weight * term(worker, job, source, now) for weight, term in terms)
        return -score, worker.worker_id

    return min(candidates, key=rank).worker_id
