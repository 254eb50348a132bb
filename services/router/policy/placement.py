"""Chooses the worker that runs a prompt, and the one that decodes it.

Pure functions of (job, workers, now, config).

A choice is filter (`filter.py`; what lasts is kept in `cluster.py`) -> score in [0, 1] -> weighted sum -> best; ties
are broken by worker id. All presets (`presets.py`) are weights for this one scorer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from services.core.errors import ContextLengthExceeded
from services.router.policy.cluster import Room, WorkerSubset
from services.router.policy.explanation import MOST_SCORED, Ranking
from services.router.policy.filter import (
    WhyNot,
    decode_shortage,
    import_blocks,
    kept_for_others,
    preferred,
    prefill_shortage,
    unless_untried,
)
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
    """Returns the worker for the prompt, or None to wait. `ranking` is given the candidates, and who was none.

    `handoffs_in_flight` are those that no decode worker has admitted yet. A prefill starts only if decode workers have
    room for those and this one: a lease that no worker can take over fills its prefill worker. With none in flight, one
    prefill is always let through.
    """
    ranking = ranking or Ranking()
    starts, most_tokens = workers.starts(job), config.max_queued_tokens
    no_decode_room = _no_decode_room(job, handoffs_in_flight)
    candidates = [
        worker  # the filter that takes less is asked first; a worker's own shortage is told first
        for worker, takers in starts
        if no_decode_room(worker, takers) is None and prefill_shortage(job, worker, most_tokens) is None
    ]
    if len(candidates) < len(starts):
        ranking.find_shortages = lambda: {
            worker.worker_id: why
            for worker, takers in starts
            if (why := prefill_shortage(job, worker, most_tokens) or no_decode_room(worker, takers)) is not None
        }
    return _best(candidates, job, None, now, config.prefill_terms, ranking, workers.lenders(config))


def shortest_queue(job: Job, workers: WorkerSubset, handoffs_in_flight: HandoffsInFlight) -> WorkerView | None:
    """Returns the worker that would begin the prompt first, whether it may wait there now or not; None if decode
    workers have no room for one more handoff."""

    def wait(worker: WorkerView) -> tuple[float, str]:
        return worker.queued_tokens * worker.load.ms_per_prefill_token, worker.worker_id

    no_decode_room = _no_decode_room(job, handoffs_in_flight)
    able = [
        worker
        for worker, takers in workers.starts(job)
        if worker.worker_id not in job.kept_off and no_decode_room(worker, takers) is None
    ]
    return min(able, key=wait, default=None)


def _no_decode_room(job: Job, handoffs_in_flight: HandoffsInFlight) -> Callable[[WorkerView, Room], WhyNot | None]:
    """Returns the filter that says why the handoff of a prompt on a worker would find no room, after those in flight,
    at those that could take it over."""
    if not handoffs_in_flight and not job.headroom:
        return lambda worker, takers: None
    found: dict[tuple[Room, int], WhyNot | None] = {}  # most sources share their takers, and the size of their blocks

    def shortage(worker: WorkerView, takers: Room) -> WhyNot | None:
        if worker.roles is Role.MIXED:
            return None
        key = (takers, worker.block_size)
        try:
            return found[key]
        except KeyError:
            num_blocks, taken = import_blocks(job, worker), handoffs_in_flight.num_blocks(worker.block_size)
            has_room = takers.num_blocks - taken >= num_blocks + kept_for_others(job, takers.size, num_blocks)
            return found.setdefault(key, None if has_room else WhyNot.NO_DECODE_ROOM)

    return shortage


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

    `able` has the workers of `WorkerSubset.able` that may be asked. `ranking` is given the candidates, and who was
    none. `lenders` are those of `WorkerSubset.lenders`, for a prompt that is to be computed there.
    """
    ranking = ranking or Ranking()
    asked = preferred(able, job, source, ranking.noted)
    candidates = [worker for worker in asked if decode_shortage(job, source, worker) is None]
    if len(candidates) < len(asked):
        ranking.find_shortages = lambda: {
            worker.worker_id: why for worker in asked if (why := decode_shortage(job, source, worker)) is not None
        }
    return _best(candidates, job, source, now, config.decode_terms, ranking, lenders)


def place_park(
    job: Job, source: Source, stores: list[WorkerView], now: float, ranking: Ranking | None = None
) -> str | None:
    """Returns the store that takes the handoff over, of those that could and have room; None if there is none."""
    ranking = ranking or Ranking()
    return _best(unless_untried(stores, source, ranking.noted), job, source, now, PARK_TERMS, ranking)


def nearest_to_room(job: Job, source: Source | None, able: list[WorkerView]) -> str | None:
    """Returns the worker that could take an aged job soonest: the one with the most available blocks, enough or not.

    `able` has workers of `WorkerSubset.able`.
    """
    if not able:
        return None
    return min(preferred(able, job, source, {}), key=_by_room).worker_id


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
    able = [worker for worker, _ in workers.starts(job) if worker.worker_id not in job.kept_off]
    if not able:
        return None
    source = target = min(able, key=_by_room)
    if source.roles is not Role.MIXED:
        where = source.as_source
        target = min(preferred(workers.able(job, where), job, where, {}), key=_by_room)
    return NearestStart(
        source.worker_id,
        target.worker_id,
        source_has_room=prefill_shortage(job, source, config.max_queued_tokens) is None,
        target_has_room=source.roles is Role.MIXED or decode_shortage(job, None, target) is None,
    )


def _by_room(worker: WorkerView) -> tuple[int, str]:
    return -worker.available_blocks, worker.worker_id


def _best(
    candidates: Sequence[WorkerView],
    job: Job,
    source: Source | None,
    now: float,
    terms: Sequence[tuple[float, Term]],
    ranking: Ranking,
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
    ranked = [(-score, worker.worker_id, worker) for score, worker in zip(scores, candidates, strict=True)]
    ranked.sort()
    ranking.candidates, ranking.terms, ranking.best = candidates, scored, ranked[:MOST_SCORED]
    return ranked[0][1]
