"""Keeps the workers as placement sees them, and chooses among them. Pure.

Owns: the newest view of each worker; for each kind of job, who could ever run it and take it over, found once per
topology; the room of each set of workers that take over from one source, added up as snapshots come; and the choice of
the worker that runs a prompt, decodes it or parks it. Never: what stands in one worker's way (`filter.py`), or what
speaks for it (`terms.py`).

A topology lasts until a worker comes, goes, or changes in what does not depend on its load: its health, say. Jobs that
no worker of the topology tells apart by their lengths have one `Fit`.

A choice is filter -> score in [0, 1] -> weighted sum -> best; ties are broken by worker id. All presets (`presets.py`)
are weights for this one scorer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from services.core.errors import ContextLengthExceeded
from services.router.policy.explanation import MOST_SCORED, PlacedPhase, Ranking
from services.router.policy.filter import (
    LeftOutWorkers,
    Reasons,
    WhyNot,
    can_take_over,
    decode_obstacle,
    decode_shortage,
    kept_for_others,
    park_obstacle,
    preferred,
    prefill_obstacle,
    prefill_shortage,
    sift,
    unless_all,
    unless_untried,
)
from services.router.policy.terms import PARK_TERMS, PolicyConfig, Question, Term
from services.router.policy.views import Fingerprint, HandoffsInFlight, Job, Role, Source, WorkerView

_MOST_FITS = 1024
"""The most fits kept at once; requests that failed on different workers are of different kinds."""


@dataclass(eq=False, slots=True)
class Room:
    """Counts the blocks available to workers that take over from the same sources, added together."""

    num_blocks: int
    """Blocks that are available by the newest snapshots."""
    size: int
    """All their blocks."""


@dataclass(frozen=True, slots=True)
class Start:
    """Names a worker that could run a prompt, and the room of those that could take it over or keep its handoff."""

    worker_id: str
    room: Room
    """The room of the workers that could take it over, and of the stores that could keep it until then."""


class Cluster:
    """Keeps the newest view of every worker."""

    def __init__(self, views: Iterable[WorkerView] = (), *, replay_across_engines: bool = False) -> None:
        """Lets jobs that nobody of their fingerprint could take go to another engine, with `replay_across_engines`."""
        self.replay_across_engines = replay_across_engines
        self.views: dict[str, WorkerView] = {}
        self._parts: dict[frozenset[str], WorkerSubset] = {}
        self._rooms: dict[tuple[str, ...], Room] = {}
        self._rooms_of: dict[str, list[Room]] = {}
        self._num_fits = 0
        for view in views:
            self.put(view)

    def put(self, view: WorkerView) -> None:
        """Adds a worker, or replaces what is known of it."""
        before = self.views.get(view.worker_id)
        self.views[view.worker_id] = view
        if before is None or _lasting(before) != _lasting(view):
            self._forget()
        elif num_more := view.load.available_blocks - before.load.available_blocks:
            for room in self._rooms_of.get(view.worker_id, ()):
                room.num_blocks += num_more

    def drop(self, worker_id: str) -> None:
        """Removes a worker, if it is there."""
        if self.views.pop(worker_id, None) is not None:
            self._forget()

    @property
    def everyone(self) -> WorkerSubset:
        return self.without(frozenset())

    def without(self, claimed: frozenset[str]) -> WorkerSubset:
        """Returns the workers that are not claimed. It is valid until something changes."""
        part = self._parts.get(claimed)
        if part is None:
            part = WorkerSubset(self, [view for id, view in sorted(self.views.items()) if id not in claimed])
            self._parts[claimed] = part
        return part

    def room_of(self, worker_ids: tuple[str, ...]) -> Room:
        room = self._rooms.get(worker_ids)
        if room is None:
            views = [self.views[worker_id] for worker_id in worker_ids]
            room = Room(sum(view.load.available_blocks for view in views), sum(view.num_blocks for view in views))
            self._rooms[worker_ids] = room
            for worker_id in worker_ids:
                self._rooms_of.setdefault(worker_id, []).append(room)
        return room

    def note_fit(self) -> None:
        """Counts a fit that is kept. Beyond `_MOST_FITS` all are dropped, and found again when they are asked for."""
        self._num_fits += 1
        if self._num_fits > _MOST_FITS:
            self._forget()

    def check(self) -> None:
        """Raises AssertionError if a kept sum or fit is not what is found anew. For tests and the simulator."""
        for worker_ids, room in self._rooms.items():
            assert room.num_blocks == sum(self.views[worker_id].load.available_blocks for worker_id in worker_ids)
        for part in self._parts.values():
            part.check()

    def _forget(self) -> None:
        self._parts, self._rooms, self._rooms_of, self._num_fits = {}, {}, {}, 0


class WorkerSubset:
    """Holds some of the workers, in one topology, and what jobs fit them. Workers come in the order of their ids
    everywhere: so that of equally good ones the first is taken."""

    def __init__(self, cluster: Cluster, views: list[WorkerView]) -> None:
        ready = [view for view in views if view.ready]
        self.longest_prompt = max((view.context_tokens for view in ready if view.roles.can_prefill), default=0)
        """Tokens below which a prompt must stay to run on a prefill worker."""
        self.longest_sequence = max((view.context_tokens for view in ready if view.roles.can_decode), default=0)
        """Tokens of the longest sequence that these workers could serve if they were idle: prompt and output."""
        self.decoder_ids = frozenset([view.worker_id for view in views if view.roles.can_decode])
        """The decode workers, ready or not."""
        self.has_stores = any(Role.STORE in view.roles for view in views)
        self._cluster = cluster
        self._worker_ids = [view.worker_id for view in views]
        self._fits: dict[tuple[str, int, int, frozenset[str], Fingerprint | None, bool, frozenset[str]], Fit] = {}
        # The lengths beyond which a job no longer fits one or another worker, of all: whether an ejected one is spared
        # depends on the claimed ones too.
        everyone = cluster.views.values()
        self._prompt_bounds = sorted(
            {view.context_tokens - 1 for view in everyone if view.roles.can_prefill}
            | {(view.num_blocks - 1) * view.block_size for view in everyone if view.roles.can_decode}
            | {view.num_blocks * view.block_size for view in everyone if view.roles is Role.STORE}
        )
        self._sequence_bounds = sorted({view.context_tokens for view in everyone if view.roles.can_decode})

    def fit(self, job: Job) -> Fit:
        if job.fingerprint is not None and self._cluster.replay_across_engines:
            can_stay = self._cluster.everyone._fit(replace(job, across_engines=False)).can_begin
            job = replace(job, across_engines=not can_stay)
        return self._fit(job)

    def _fit(self, job: Job) -> Fit:
        key = (
            job.model,
            bisect_left(self._prompt_bounds, job.num_tokens),
            bisect_left(self._sequence_bounds, job.total_tokens),
            job.avoid,
            job.fingerprint,
            job.across_engines,
            job.unserved_by,
        )
        fit = self._fits.get(key)
        if fit is None:
            fit = self._fits[key] = Fit(self._cluster, self.views(), job)
            self._cluster.note_fit()
        return fit

    def starts(self, job: Job) -> list[tuple[WorkerView, Room]]:
        """Returns the workers of `Fit.starts`, each with the room of those that could take the prompt over from it or
        keep its handoff."""
        views = self._cluster.views
        return [(views[start.worker_id], start.room) for start in self.fit(job).starts]

    def able(self, job: Job, source: Source | None) -> list[WorkerView]:
        """Returns the workers that could ever take the job over from `source`; without a source, those that could run
        all of it."""
        fit, views = self.fit(job), self._cluster.views
        return [views[worker_id] for worker_id in fit.takers(source)]

    def keepers(self, job: Job, source: Source) -> list[WorkerView]:
        """Returns the stores that could ever keep the handoff of what runs at the source."""
        return [self._cluster.views[worker_id] for worker_id in self.fit(job).keepers(source)]

    def check(self) -> None:
        """Raises AssertionError if a fit that is kept is not what is found anew."""
        for fit in self._fits.values():
            fit.check(self.views())

    def view(self, worker_id: str) -> WorkerView:
        return self._cluster.views[worker_id]

    def views(self) -> list[WorkerView]:
        return [self._cluster.views[worker_id] for worker_id in self._worker_ids]

    def lenders(self, config: PolicyConfig) -> Collection[WorkerView]:
        """Returns everybody from whom these workers could bring prefixes, claimed or not: nobody where that is not
        done, or no term looks at prompts."""
        return self._cluster.views.values() if config.share_prefixes and config.looks_at_prompts else ()


@dataclass(frozen=True, slots=True)
class _Able:
    """Names the workers that could do something, and says what stands in the others' way."""

    worker_ids: tuple[str, ...]
    left_out: LeftOutWorkers


class Fit:
    """Computes which of some workers could ever run, take over or decode jobs of one kind, and why the others not."""

    def __init__(self, cluster: Cluster, views: list[WorkerView], job: Job) -> None:
        self._cluster = cluster
        self._worker_ids = [view.worker_id for view in views]
        self._job = replace(job, block_hashes={})  # what is kept must not keep them in memory
        self._found: dict[tuple[bool, tuple[str, str] | None], _Able] = {}
        self._starts: tuple[Start, ...] | None = None
        self._left_out_of_starts = LeftOutWorkers()
        self._no_sources: Reasons = {}
        sources = sift((view for view in views if view.roles.can_prefill), self._source_obstacle, self._no_sources)
        self._sources = [view.as_source for view in sources]

    @property
    def decoders(self) -> tuple[str, ...]:
        """Returns the workers that could run the whole of it."""
        return self.takers(None)

    @property
    def can_hand_over(self) -> bool:
        """Returns whether some worker could run the prompt and some worker take it over."""
        return bool(self._sources)

    @property
    def can_begin(self) -> bool:
        """Returns whether some worker could run it, in two parts or as a whole."""
        return bool(self._sources or self.decoders)

    @property
    def starts(self) -> tuple[Start, ...]:
        """Returns where the prompt may run, whether there is room or not: as far as there is a choice, no worker on
        which it has failed, and only workers from which another is known to be able to take it over."""
        if self._starts is None:
            self._starts = self._find_starts()
        return self._starts

    def takers(self, source: Source | None) -> tuple[str, ...]:
        """Returns the workers that could ever take over what runs at the source; without a source, those that could run
        the whole of it."""
        return self._able(source).worker_ids

    def keepers(self, source: Source) -> tuple[str, ...]:
        """Returns the stores that could ever keep the handoff of what runs at the source."""
        return self._able(source, to_keep=True).worker_ids

    def left_out(self, phase: PlacedPhase, source: Source | None) -> LeftOutWorkers:
        """Returns the workers with the role of the phase that could never take the job, with the reason, or are left
        out for the sake of those that could."""
        if phase is PlacedPhase.PREFILL:
            _ = self.starts
            return self._left_out_of_starts
        return self._able(source, to_keep=phase is PlacedPhase.PARK).left_out

    def check(self, views: list[WorkerView]) -> None:
        """Raises AssertionError if it is not what these views, now, would make it."""
        fresh = Fit(self._cluster, views, self._job)
        assert (self.decoders, self._sources) == (fresh.decoders, fresh._sources)
        for source in self._sources:
            assert self._able(source) == fresh._able(source)
            assert self._able(source, to_keep=True) == fresh._able(source, to_keep=True)
        assert {start.worker_id for start in self.starts} == {start.worker_id for start in fresh.starts}
        assert self._left_out_of_starts == fresh._left_out_of_starts

    def _able(self, source: Source | None, *, to_keep: bool = False) -> _Able:
        key = (to_keep, None if source is None else (source.worker_id, source.fingerprint.kv))
        able = self._found.get(key)
        if able is None:
            able = self._found[key] = self._find(source, to_keep)
        return able

    def _find(self, source: Source | None, to_keep: bool) -> _Able:
        job, role = self._job, Role.STORE if to_keep else Role.DECODE

        def obstacle(view: WorkerView) -> WhyNot | None:
            if source is not None and to_keep:
                return park_obstacle(job, source, view)
            return decode_obstacle(job, source, view)

        reasons: Reasons = {}
        found = sift((view for view in self._views() if role in view.roles), obstacle, reasons)
        here = source.worker_id if source is not None else ""
        found = self._without_ejected(found, lambda view: role in view.roles and obstacle(view) is None, reasons, here)
        return _Able(tuple([view.worker_id for view in found]), LeftOutWorkers().after(reasons))

    def _find_starts(self) -> tuple[Start, ...]:
        views, reasons = self._cluster.views, dict(self._no_sources)
        found = self._without_ejected([views[each.worker_id] for each in self._sources], self._could_start, reasons)
        found = unless_all(found, self._job.avoid, WhyNot.BLAMED, reasons)
        sources = [view.as_source for view in found]
        untried = [source.worker_id for source in sources if not self._has_tried_taker(source)]
        left = {view.worker_id for view in unless_all(found, untried, WhyNot.UNTRIED, reasons)}
        self._left_out_of_starts = LeftOutWorkers().after(reasons)
        return tuple(
            Start(source.worker_id, self._cluster.room_of(self.takers(source) + self.keepers(source)))
            for source in sources
            if source.worker_id in left
        )

    def _source_obstacle(self, view: WorkerView) -> WhyNot | None:
        why = prefill_obstacle(self._job, view)
        return WhyNot.NO_TAKER if why is None and not self.takers(view.as_source) else why

    def _could_start(self, view: WorkerView) -> bool:
        """Returns whether the worker could run the prompt, and some worker, claimed or not, take it over."""
        if not view.roles.can_prefill or prefill_obstacle(self._job, view) is not None:
            return False
        source, others = view.as_source, self._cluster.views.values()
        return any(can_take_over(self._job, source, other) for other in others)

    def _without_ejected(
        self, found: list[WorkerView], could: Callable[[WorkerView], bool], reasons: Reasons, here: str = ""
    ) -> list[WorkerView]:
        """Returns the able workers found: an ejected one only if, of all workers, claimed or not, no other could do it
        on which the job has not failed. A handoff may stay where it is, `here`."""
        ejected = [view.worker_id for view in found if view.ejected and view.worker_id != here]
        avoid, everyone = self._job.avoid, self._cluster.views.values()
        if not ejected or not any(could(view) for view in everyone if not view.ejected and view.worker_id not in avoid):
            return found
        reasons.update((worker_id, WhyNot.BLAMED if worker_id in avoid else WhyNot.EJECTED) for worker_id in ejected)
        return [view for view in found if view.worker_id not in ejected]

    def _views(self) -> list[WorkerView]:
        return [self._cluster.views[worker_id] for worker_id in self._worker_ids]

    def _has_tried_taker(self, source: Source) -> bool:
        views = self._cluster.views
        return any(source.worker_id not in views[worker_id].untried for worker_id in self.takers(source))


def _lasting(
    view: WorkerView,
) -> tuple[str, bool, bool, bool, Role, Fingerprint, int, int, int, frozenset[str], frozenset[str]]:
    """Returns everything of a view that decides which jobs fit it: what does not change with the load."""
    return (
        view.model,
        view.ready,
        view.on_trial,
        view.ejected,
        view.roles,
        view.fingerprint,
        view.block_size,
        view.num_blocks,
        view.max_model_len,
        view.barred,
        view.untried,
    )


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
            taken = handoffs_in_flight.num_blocks(worker.block_size)
            # As `import_blocks`, bounded by the takers' pools: whose they are, and not the source's, is what counts.
            num_blocks = min(worker.blocks_for(job.num_tokens) + job.num_answers, takers.size)
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

    asked = Question(job, source, now, lenders)
    values = [term(candidates, asked) for _, term in terms]
    scores = [0.0] * len(candidates)
    for (weight, _), each in zip(terms, values, strict=True):
        scores = [score + weight * value for score, value in zip(scores, each)]  # noqa: B905
    best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[:MOST_SCORED]  # stable: see `WorkerSubset`
    ranking.num_candidates = len(candidates)
    ranking.best = [(candidates[place], scores[place], tuple([each[place] for each in values])) for place in best]
    return candidates[best[0]].worker_id
