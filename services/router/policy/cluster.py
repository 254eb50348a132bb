"""Keeps the workers as placement sees them: which of them a job fits, found once per topology, and what room they have.
Pure.

Owns: the newest view of each worker; for each kind of job, who could ever run it and take it over; and the room of each
set of workers that take over from one source, added up as snapshots come. Never: which worker is best (`placement.py`).

A topology lasts until a worker comes, goes, or changes in what does not depend on its load: its health, say. Jobs that
no worker of the topology tells apart by their lengths have one `Fit`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from services.router.policy.explanation import MOST_NAMED, LeftOut, LeftOutWorkers, WhyNot
from services.router.policy.stores import can_park
from services.router.policy.terms import PolicyConfig
from services.router.policy.views import Fingerprint, Job, Role, Source, WorkerView

_MOST_FITS = 1024
"""The most fits kept at once; requests that failed on different workers are of different kinds."""


def can_prefill(job: Job, worker: WorkerView) -> bool:
    """Returns whether the worker could ever run the job's prompt, whatever its load is now."""
    able = worker.ready and worker.roles.can_prefill and job.num_tokens < worker.context_tokens
    return able and _may_compute(job, worker)


def can_decode(job: Job, worker: WorkerView) -> bool:
    """Returns whether the worker could ever run the whole sequence, whatever its load is now."""
    return worker.ready and _fits(job, worker) and _may_compute(job, worker)


def can_take_over(job: Job, source: Source, worker: WorkerView) -> bool:
    """Returns whether the worker could ever take over the handoff, whatever its load is now.

    In place it needs no new block; elsewhere it needs all the prompt's blocks and one.
    """
    if worker.worker_id == source.worker_id:
        return (worker.ready or worker.on_trial) and _fits(job, worker)
    if not worker.ready or not _fits(job, worker) or source.worker_id in worker.barred:
        return False
    return worker.fingerprint.kv == source.fingerprint.kv and import_blocks(job, worker) <= worker.num_blocks


def import_blocks(job: Job, worker: WorkerView) -> int:
    """Returns the blocks that a decode worker sets aside for a handoff: its prompt's and one to grow into, and one for
    each further answer, as far as its pool is large enough."""
    fewest = worker.blocks_for(job.num_tokens) + 1
    return fewest if job.num_answers == 1 else max(fewest, min(fewest + job.num_answers - 1, worker.num_blocks))


def unblamed(able: list[WorkerView], job: Job) -> list[WorkerView]:
    """Returns the workers that have not failed under this job, or all of them if each has.

    Room does not matter: the worker that failed often looks the freest, and a job that went back there because the
    others have no room would use up its attempts.
    """
    if not job.avoid:
        return able
    return [worker for worker in able if worker.worker_id not in job.avoid] or able


def _may_compute(job: Job, worker: WorkerView) -> bool:
    """Returns whether the worker may compute the job: one of its model and of an engine that serves such a job, and
    after tokens were streamed, only one of an equal fingerprint, or of another engine where the job may go there.

    To take over KV, an equal `kv` is enough, and the model.
    """
    bound, found = job.fingerprint, worker.fingerprint
    if worker.model != job.model or found.engine in job.unserved_by:
        return False
    return bound is None or found == bound or (job.across_engines and found.engine != bound.engine)


def _fits(job: Job, worker: WorkerView) -> bool:
    return worker.roles.can_decode and worker.model == job.model and job.total_tokens <= worker.context_tokens


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
            part = WorkerSubset(self, [view for view in self.views.values() if view.worker_id not in claimed])
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
    """Holds some of the workers, in one topology, and what jobs fit them."""

    def __init__(self, cluster: Cluster, views: list[WorkerView]) -> None:
        ready = [view for view in views if view.ready]
        self.longest_prompt = max((view.context_tokens for view in ready if view.roles.can_prefill), default=0)
        """Tokens below which a prompt must stay to run on a prefill worker."""
        self.longest_sequence = max((view.context_tokens for view in ready if view.roles.can_decode), default=0)
        """Tokens of the longest sequence that these workers could serve if they were idle: prompt and output."""
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

    def able(self, job: Job, source: Source | None) -> list[WorkerView]:
        """Returns the workers that could ever take the job over from `source`; without a source, those that could run
        all of it."""
        fit, views = self.fit(job), self._cluster.views
        worker_ids = fit.decoders if source is None else fit.takers(source)
        return [views[worker_id] for worker_id in worker_ids]

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


class Fit:
    """Computes which of some workers could ever run, take over or decode jobs of one kind."""

    def __init__(self, cluster: Cluster, views: list[WorkerView], job: Job) -> None:
        self._cluster = cluster
        self._worker_ids = [view.worker_id for view in views]
        self._job = replace(job, block_hashes={})  # what is kept must not keep them in memory
        self.decoders = self._spared(views, lambda view: can_decode(job, view))
        """The workers that could run the whole of it."""
        self._takers: dict[tuple[str, str], tuple[str, ...]] = {}
        self._keepers: dict[tuple[str, str], tuple[str, ...]] = {}
        self._starts: tuple[Start, ...] | None = None
        self._left_out_of_starts: LeftOutWorkers | None = None
        self._left_out_of_takers: dict[tuple[str, str] | None, LeftOutWorkers] = {}
        sources = (view.as_source for view in views if can_prefill(job, view))
        self._sources = [source for source in sources if self.takers(source)]

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
            views = self._cluster.views
            spared = self._spared([views[source.worker_id] for source in self._sources], self._may_start)
            left = {view.worker_id for view in unblamed([views[worker_id] for worker_id in spared], self._job)}
            sources = [source for source in self._sources if source.worker_id in left]
            tried = [source for source in sources if self._has_tried_taker(source)] or sources
            self._starts = tuple(
                Start(source.worker_id, self._cluster.room_of(self.takers(source) + self.keepers(source)))
                for source in tried
            )
        return self._starts

    def takers(self, source: Source) -> tuple[str, ...]:
        """Returns the workers that could ever take over what runs at the source."""
        key = (source.worker_id, source.fingerprint.kv)
        if key not in self._takers:
            views = (self._cluster.views[worker_id] for worker_id in self._worker_ids)
            self._takers[key] = self._spared(views, lambda view: can_take_over(self._job, source, view), source)
        return self._takers[key]

    def keepers(self, source: Source) -> tuple[str, ...]:
        """Returns the stores that could ever keep the handoff of what runs at the source."""
        key = (source.worker_id, source.fingerprint.kv)
        if key not in self._keepers:
            views = (self._cluster.views[worker_id] for worker_id in self._worker_ids)
            self._keepers[key] = tuple(view.worker_id for view in views if can_park(self._job, source, view))
        return self._keepers[key]

    def _spared(
        self, views: Iterable[WorkerView], able: Callable[[WorkerView], bool], source: Source | None = None
    ) -> tuple[str, ...]:
        """Returns the able ones of these workers: an ejected one only if, of all workers, claimed or not, no other is
        able on which the job has not failed. A handoff may stay where it is."""
        found = [view for view in views if able(view)]
        if any(view.ejected for view in found):
            everyone = self._cluster.views.values()
            if any(able(view) for view in everyone if not view.ejected and view.worker_id not in self._job.avoid):
                here = source.worker_id if source is not None else None
                found = [view for view in found if not view.ejected or view.worker_id == here]
        return tuple(view.worker_id for view in found)

    def _may_start(self, view: WorkerView) -> bool:
        source, others = view.as_source, self._cluster.views.values()
        return can_prefill(self._job, view) and any(can_take_over(self._job, source, other) for other in others)

    @property
    def left_out_of_starts(self) -> LeftOutWorkers:
        """Returns the workers that take prompts and are not among `starts`, with the reason."""
        if self._left_out_of_starts is None:
            starts = {start.worker_id for start in self.starts}
            left = [view for view in self._views() if view.roles.can_prefill and view.worker_id not in starts]
            named = [LeftOut(view.worker_id, self._why_no_start(view)) for view in left[:MOST_NAMED]]
            self._left_out_of_starts = LeftOutWorkers(tuple(named), len(left))
        return self._left_out_of_starts

    def left_out_of_takers(self, source: Source | None) -> LeftOutWorkers:
        """Returns the decode workers that could not take over from the source, with the reason; without a source, those
        that could not run the whole of it."""
        key = None if source is None else (source.worker_id, source.fingerprint.kv)
        if key not in self._left_out_of_takers:
            takers = self.decoders if source is None else self.takers(source)
            left = [view for view in self._views() if view.roles.can_decode and view.worker_id not in takers]
            named = [LeftOut(view.worker_id, self._why_no_taker(source, view)) for view in left[:MOST_NAMED]]
            self._left_out_of_takers[key] = LeftOutWorkers(tuple(named), len(left))
        return self._left_out_of_takers[key]

    def check(self, views: list[WorkerView]) -> None:
        """Raises AssertionError if it is not what these views, now, would make it."""
        fresh = Fit(self._cluster, views, self._job)
        assert (self.decoders, self._sources) == (fresh.decoders, fresh._sources)
        for source in self._sources:
            assert self.takers(source) == fresh.takers(source)
            assert self.keepers(source) == fresh.keepers(source)
        assert {start.worker_id for start in self.starts} == {start.worker_id for start in fresh.starts}
        assert self.left_out_of_starts == fresh.left_out_of_starts

    def _views(self) -> list[WorkerView]:
        return [self._cluster.views[worker_id] for worker_id in self._worker_ids]

    def _why_no_start(self, view: WorkerView) -> WhyNot:
        if not view.ready:
            return WhyNot.NOT_READY
        if self._job.num_tokens >= view.context_tokens:
            return WhyNot.TOO_LONG
        if not _may_compute(self._job, view):
            return WhyNot.OTHER_FINGERPRINT
        if not self.takers(view.as_source):
            return WhyNot.NO_TAKER
        if view.worker_id in self._job.avoid:
            return WhyNot.BLAMED
        return WhyNot.EJECTED if view.ejected else WhyNot.UNTRIED

    def _why_no_taker(self, source: Source | None, view: WorkerView) -> WhyNot:
        job = self._job
        if not view.ready:
            return WhyNot.NOT_READY
        if job.total_tokens > view.context_tokens or (source and import_blocks(job, view) > view.num_blocks):
            return WhyNot.TOO_LONG
        if source is not None and source.worker_id in view.barred:
            return WhyNot.BARRED
        if can_decode(job, view) if source is None else can_take_over(job, source, view):
            return WhyNot.EJECTED
        return WhyNot.OTHER_FINGERPRINT

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
