"""Chooses the worker that runs a prompt, and the one that decodes it.

Pure functions of (job, workers, now, config).

A choice is filter (ready, compatible: `cluster.py`; room) -> score in [0, 1] -> weighted sum -> best; ties are broken
by worker id. All presets (`presets.py`) are weights for this one scorer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from services.core.errors import ContextLengthExceeded
from services.router.policy.cluster import Room, WorkerSubset, import_blocks, unblamed
from services.router.policy.explanation import MOST_SCORED, LeftOut, LeftOutWorkers, Ranking, WhyNot
from services.router.policy.shares import OVER_SHARE_LINE
from services.router.policy.terms import PARK_TERMS, Comparison, PolicyConfig, Term
from services.router.policy.views import HandoffsInFlight, Job, Role, Source, WorkerView


def resolve_max_tokens(num_prompt_tokens: int, max_tokens: int | None, context_tokens: int) -> int:
    """Returns `max_tokens`, or what the context leaves if it is None.

    `context_tokens` is the longest sequence that any pool could hold. Raises ContextLengthExceeded if no pool could
    ever hold the request.
    """
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


def place_prefill(
    job: Job,
    workers: WorkerSubset,
    handoffs_in_flight: HandoffsInFlight,
    now: float,
    config: PolicyConfig,
    ranking: Ranking | None = None,
) -> str | None:
    """Returns the worker for the prompt, or None to wait. `ranking` is given the candidates.

    `handoffs_in_flight` are those that no decode worker has admitted yet. A prefill starts only if decode workers have
    room for those and this one: a lease that no worker can take over fills its prefill worker. With none in flight, one
    prefill is always let through.
    """
    able = _with_decode_room(job, workers, handoffs_in_flight)
    candidates = [worker for worker in able if _has_prefill_room(job, worker, config)]
    return _best(candidates, job, None, now, config.prefill_terms, ranking, workers.lenders(config))


def shortest_queue(job: Job, workers: WorkerSubset, handoffs_in_flight: HandoffsInFlight) -> WorkerView | None:
    """Returns the worker that would begin the prompt first, whether it may wait there now or not; None if decode
    workers have no room for one more handoff."""

    def wait(worker: WorkerView) -> tuple[float, str]:
        return worker.queued_tokens * worker.load.ms_per_prefill_token, worker.worker_id

    return min(_with_decode_room(job, workers, handoffs_in_flight), key=wait, default=None)


def _with_decode_room(job: Job, workers: WorkerSubset, handoffs_in_flight: HandoffsInFlight) -> Iterator[WorkerView]:
    """Yields the workers where the prompt may run and from which its handoff would find room, after those in flight."""
    decode_room: dict[tuple[Room, int], bool] = {}  # most sources share their takers, and the size of their blocks
    for start in workers.fit(job).starts:
        if start.worker_id in job.kept_off:
            continue
        worker = workers.view(start.worker_id)
        if worker.roles is not Role.MIXED and (handoffs_in_flight or job.headroom):
            key = (start.room, worker.block_size)
            if key not in decode_room:
                decode_room[key] = _has_decode_room(job, worker, start.room, handoffs_in_flight)
            if not decode_room[key]:
                continue
        yield worker


def place_decode(
    job: Job,
    source: Source | None,
    able: list[WorkerView],
    now: float,
    config: PolicyConfig,
    ranking: Ranking | None = None,
    lenders: Collection[WorkerView] = (),
) -> str | None:
    """Returns the worker that takes over the handoff of `source` (None: runs prompt and output), or None to wait.

    `able` has the workers of `WorkerSubset.able` that may be asked. `ranking` is given the candidates. `lenders` are
    those of `WorkerSubset.lenders`, for a prompt that is to be computed there.
    """
    candidates = [worker for worker in _tried(unblamed(able, job), source) if _has_room_to_decode(job, source, worker)]
    return _best(candidates, job, source, now, config.decode_terms, ranking, lenders)


def place_park(
    job: Job, source: Source, stores: list[WorkerView], now: float, ranking: Ranking | None = None
) -> str | None:
    """Returns the store that takes the handoff over, of those that could and have room; None if there is none."""
    return _best(_tried(stores, source), job, source, now, PARK_TERMS, ranking)


def nearest_to_room(job: Job, source: Source | None, able: list[WorkerView]) -> str | None:
    """Returns the worker that could take an aged job soonest: the one with the most available blocks, enough or not.

    `able` has workers of `WorkerSubset.able`.
    """
    if not able:
        return None
    return min(_tried(unblamed(able, job), source), key=_by_room).worker_id


@dataclass(frozen=True, slots=True)
class NearestStart:
    """Names where an aged prompt could begin soonest, and says whether it could begin now."""

    source_id: str
    """The worker that would run the prompt."""
    target_id: str
    """The worker that would take it over; the source itself if that is a mixed worker."""
    source_has_room: bool
    target_has_room: bool


def nearest_start(job: Job, workers: WorkerSubset, config: PolicyConfig) -> NearestStart | None:
    """Returns the prefill worker with the most available blocks, and with it the best worker to take over.

    The latter is the one with the most available blocks among those that could, enough or not. Other handoffs in flight
    do not count: the room is to be kept for this one.
    """
    able = [workers.view(start.worker_id) for start in workers.fit(job).starts if start.worker_id not in job.kept_off]
    if not able:
        return None
    source = target = min(able, key=_by_room)
    if source.roles is not Role.MIXED:
        where = source.as_source
        target = min(_tried(unblamed(workers.able(job, where), job), where), key=_by_room)
    return NearestStart(
        source.worker_id,
        target.worker_id,
        source_has_room=_has_prefill_room(job, source, config),
        target_has_room=source.roles is Role.MIXED or _has_room_to_decode(job, None, target),
    )


def _tried(able: list[WorkerView], source: Source | None) -> list[WorkerView]:
    """Returns those that are known to take over what runs at `source`, whether they have room or not; all, if none is
    known to."""
    if source is None:
        return able
    return [worker for worker in able if source.worker_id not in worker.untried] or able


def _by_room(worker: WorkerView) -> tuple[int, str]:
    return -worker.available_blocks, worker.worker_id


def _has_room_to_decode(job: Job, source: Source | None, worker: WorkerView) -> bool:
    """Returns whether the worker has room by its newest snapshot; the worker itself decides.

    An idle worker always has room, since it can evict its cached blocks.
    """
    if source is not None and worker.worker_id == source.worker_id:
        return True  # adoption in place takes no new blocks
    if worker.idle:
        return True
    num_blocks, num_places = import_blocks(job, worker), min(job.num_answers, worker.max_num_seqs)
    places = worker.max_num_seqs - worker.num_sequences
    return worker.available_blocks >= num_blocks + kept_for_others(
        job, worker.num_blocks, num_blocks
    ) and places >= num_places + kept_for_others(job, worker.max_num_seqs, num_places)


def kept_for_others(job: Job, room: int, needed: int) -> int:
    """Returns how much of some room the job must leave to other tenants. It is at most half of what the job does not
    need itself: else one that needs most of a worker had to wait until nobody else has anything there."""
    return min(math.ceil(job.headroom * room), max(0, room - needed + 1) // 2) if job.headroom else 0


def _has_prefill_room(job: Job, worker: WorkerView, config: PolicyConfig) -> bool:
    if worker.idle:
        return True
    num_blocks = worker.blocks_for(job.num_tokens)
    most_tokens = config.max_queued_tokens * (OVER_SHARE_LINE if job.headroom else 1.0)
    return (
        worker.available_blocks >= num_blocks + kept_for_others(job, worker.num_blocks, num_blocks)
        and worker.queued_tokens < most_tokens
    )


def _has_decode_room(job: Job, source: WorkerView, takers: Room, handoffs_in_flight: HandoffsInFlight) -> bool:
    """Returns whether the handoff of a prefill on `source` could be taken over, after those in flight."""
    taken = handoffs_in_flight.num_blocks(source.block_size)
    num_blocks = import_blocks(job, source)
    return takers.num_blocks - taken >= num_blocks + kept_for_others(job, takers.size, num_blocks)


def _best(
    candidates: Sequence[WorkerView],
    job: Job,
    source: Source | None,
    now: float,
    terms: Sequence[tuple[float, Term]],
    ranking: Ranking | None = None,
    lenders: Collection[WorkerView] = (),
) -> str | None:
    if not candidates:
        return None

    scored = [
        (weight, term.among(candidates, job, lenders) if isinstance(term, Comparison) else term)
        for weight, term in terms
    ]

    scores = [0.0] * len(candidates)
    for weight, term in scored:
        scores = [
            score + weight * term(worker, job, source, now) for score, worker in zip(scores, candidates, strict=True)
        ]
    ranked = (((-score, worker.worker_id), worker) for score, worker in zip(scores, candidates, strict=True))
    if ranking is None:
        return min(ranked)[1].worker_id
    ranking.candidates, ranking.terms = candidates, scored
    ranking.best = heapq.nsmallest(MOST_SCORED, ranked)
    return ranking.best[0][1].worker_id


# Who was no candidate


def left_out_of_start(
    job: Job,
    workers: WorkerSubset,
    claimed: Sequence[WorkerView],
    candidates: Sequence[WorkerView],
    config: PolicyConfig,
) -> LeftOutWorkers:
    """Returns the workers with the role that were no candidates in `place_prefill`, and why.

    `claimed` are those that `workers` leaves out; `candidates` are those that had room.
    """
    fit = workers.fit(job)
    claimed = [worker for worker in claimed if worker.roles.can_prefill]
    num_without_room = len(fit.starts) - len(candidates)
    if not num_without_room and not claimed:
        return fit.left_out_of_starts

    def first() -> Iterator[LeftOut]:
        had_room = {worker.worker_id for worker in candidates}
        for start in fit.starts:
            if start.worker_id not in had_room:
                yield LeftOut(start.worker_id, _why_no_start(job, workers.view(start.worker_id), config))
        for worker in claimed:
            yield LeftOut(worker.worker_id, WhyNot.CLAIMED)

    return fit.left_out_of_starts.joined(first(), num_without_room + len(claimed))


def left_out_of_decode(
    job: Job, source: Source | None, able: list[WorkerView], candidates: Collection[str]
) -> Iterable[LeftOut]:
    """Yields those of the `able` ones given to `place_decode` that were no candidates, and why."""
    fair = {worker.worker_id for worker in unblamed(able, job)}
    tried = {worker.worker_id for worker in _tried(unblamed(able, job), source)}
    for worker in able:
        if worker.worker_id in candidates:
            continue
        if worker.worker_id not in fair:
            why = WhyNot.BLAMED
        elif worker.worker_id not in tried:
            why = WhyNot.UNTRIED
        elif job.headroom and _has_room_to_decode(replace(job, headroom=0.0), source, worker):
            why = WhyNot.OVER_SHARE
        else:
            lacks_blocks = worker.available_blocks < import_blocks(job, worker)
            why = WhyNot.NO_BLOCKS if lacks_blocks else WhyNot.FULL_BATCH
        yield LeftOut(worker.worker_id, why)


def _why_no_start(job: Job, worker: WorkerView, config: PolicyConfig) -> WhyNot:
    if worker.worker_id in job.kept_off:
        return WhyNot.KEPT
    alone = replace(job, headroom=0.0)
    if job.headroom and _has_prefill_room(alone, worker, config) and not _has_prefill_room(job, worker, config):
        return WhyNot.OVER_SHARE
    if _has_prefill_room(job, worker, config):
        return WhyNot.NO_DECODE_ROOM
    lacks_blocks = worker.available_blocks < worker.blocks_for(job.num_tokens)
    return WhyNot.NO_BLOCKS if lacks_blocks else WhyNot.QUEUE_LIMIT
