"""Keeps the workers that the router knows. Pure.

Owns: worker records (state, health, newest snapshot, current legs, and predictions of what commands take that the
snapshot does not show yet), the views that policy sees, and a health record of every pair. Never: requests (it keeps
their ids only), sessions, clocks, or what counts as a failure.
"""

from __future__ import annotations

import contextlib
import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from services.core.awake import AwakeTime
from services.core.errors import Overloaded, UnknownWorker
from services.router.coordinator.events import KVGroup, WorkerInfo
from services.router.policy import (
    BringTimes,
    Cluster,
    HandoffTime,
    KnownCache,
    Load,
    PrefixIndex,
    Role,
    Source,
    WorkerView,
)
from services.router.policy.health import Health, HealthConfig, HealthRecord
from services.router.policy.outliers import Ejection, OutlierConfig, OutlierDetection

if TYPE_CHECKING:
    from baton.v1 import types_pb2


@dataclass(slots=True)
class Pair:
    """Keeps the health of transfers from one incarnation of a source to one incarnation of a destination."""

    source: WorkerInfo
    health: HealthRecord
    timings: types_pb2.PhaseTimings | None = None
    """What the destination measured of the newest transfer that a canary made."""


class Pairs:
    """Keeps the pairs of one destination, by the source's worker id."""

    def __init__(self) -> None:
        self._pairs: dict[str, Pair] = {}
        self.handoff_times: dict[str, HandoffTime] = {}
        """What the handoffs of clients' requests from each source take, and how fast their blocks come."""
        self._known: _Known | None = None
        """Sets made from the health records; None if a record has changed since."""

    def meet(self, source: WorkerInfo, target: WorkerInfo, config: HealthConfig, now: float) -> None:
        """Adds the pair if the two workers can hand over to each other. Nothing changes for a pair that is known."""
        known = self._pairs.get(source.worker_id)
        if source.worker_id == target.worker_id or source.fingerprint.kv != target.fingerprint.kv:
            return
        num_stores = (source.roles is Role.STORE) + (target.roles is Role.STORE)
        if (
            num_stores < 2
            and source.roles.gives_kv
            and target.roles.takes_kv
            and (known is None or known.source.incarnation != source.incarnation)
        ):
            self._pairs[source.worker_id] = Pair(source, HealthRecord(_unprobed(config) if num_stores else config, now))
            self.handoff_times[source.worker_id] = HandoffTime(target.token_bytes)
            self.changed()

    def forget(self, source_id: str) -> bool:
        """Drops the pair with this source. Returns whether there was one."""
        self.changed()
        self.handoff_times.pop(source_id, None)
        return self._pairs.pop(source_id, None) is not None

    def changed(self) -> None:
        """Notes that a health record has changed."""
        self._known = None

    def get(self, source: WorkerInfo) -> Pair | None:
        """Returns the pair with this source, or None if it is not known in this incarnation."""
        pair = self._pairs.get(source.worker_id)
        return pair if pair is not None and pair.source.incarnation == source.incarnation else None

    def bytes_per_s(self, source_id: str) -> float | None:
        """Returns how fast blocks come from the source; None while it is not known."""
        time = self.handoff_times.get(source_id)
        return None if time is None else time.rate.bytes_per_s

    @property
    def unsettled(self) -> list[Pair]:
        """Returns the pairs whose health changes with time or by a probe; in a cluster at rest there are none."""
        return [pair for pair in self._look().unsettled if not pair.health.settled]

    def all(self) -> list[Pair]:
        return list(self._pairs.values())

    def barred(self) -> frozenset[str]:
        """Returns the sources from which transfers have failed and are not yet known to work again."""
        return self._look().barred

    def untried(self) -> frozenset[str]:
        """Returns the sources of which it is not known whether transfers work."""
        return self._look().untried

    def _look(self) -> _Known:
        if self._known is None:
            barred = frozenset(name for name, pair in self._pairs.items() if _barred(pair.health))
            doubtful = (name for name, pair in self._pairs.items() if not pair.health.trusted)
            unsettled = tuple(pair for pair in self._pairs.values() if not pair.health.settled)
            self._known = _Known(barred, frozenset(doubtful) - barred, unsettled)
        return self._known


@dataclass(frozen=True, slots=True)
class _Known:
    barred: frozenset[str]
    untried: frozenset[str]
    unsettled: tuple[Pair, ...]


def _barred(health: HealthRecord) -> bool:
    """Returns whether the pair must not be used. A new pair may be: a client's request may be its first transfer."""
    return health.state in (Health.DOWN, Health.PROBING) and not health.takes_one


def _unprobed(config: HealthConfig) -> HealthConfig:
    """Returns the config for what no canary can probe, since a store computes nothing: requests show whether it works,
    and after failures a single one."""
    return replace(config, canaries=False, recheck_s=0.0, starts_slowly=False)


REPORT_LAG_S = 0.1
"""A snapshot that comes this much later than a command was sent is taken to count the command's tokens."""


class WorkerState(enum.Enum):
    JOINING = "joining"
    """The worker has registered; its session is not open yet."""
    READY = "ready"
    DRAINING = "draining"
    """The worker finishes what it has; nothing is placed there."""
    LOST = "lost"
    """Its session broke or fell silent. It is remembered for a while, so that requests that it could hold are not
    refused as too long."""
    LEFT = "left"
    """It ended its session in order, which is no cause for alarm. It is remembered like a lost one."""


@dataclass(slots=True)
class Prediction:
    """Keeps what a command will take, in blocks and prompt tokens, until the worker's snapshots show it."""

    blocks: int
    tokens: int
    sent_s: float
    priority: int | None = None
    """The priority with which its prompt waits at the worker; None if it brings no prompt."""
    num_sequences: int = 1
    """How many sequences of the batch it will be."""
    num_overtaking: int = 0
    """How many prompts of higher priority were sent to the worker since this one has waited long."""


@dataclass(frozen=True, slots=True)
class CancelledPrompt:
    """Keeps how many tokens a cancelled prompt had. The worker's snapshots count them until its step has ended."""

    tokens: int
    cancelled_s: float


@dataclass(slots=True)
class Worker:
    info: WorkerInfo
    state: WorkerState
    since_s: float
    health: HealthRecord
    sources: Pairs = field(default_factory=Pairs)
    """The pairs in which it is the destination."""
    load: Load | None = None
    load_s: float | None = None
    """When the newest snapshot came."""
    spoke_s: float = 0.0
    """`load_s` in awake time."""
    at_rest_since_s: float | None = None
    """Since when all its snapshots say that it has nothing to do, in awake time."""
    legs: dict[int, str] = field(default_factory=dict)
    """The requests' ids by the numbers of their current legs there."""
    predictions: dict[int, Prediction] = field(default_factory=dict)
    cancelled: list[CancelledPrompt] = field(default_factory=list)
    newest_leg: int = 0
    """The newest leg that was placed there from elsewhere; 0 for none."""
    cache: KnownCache | None = None
    """What is known of its prefix cache; None if prompts are not hashed."""
    bring_times: BringTimes = field(init=False)
    """What it takes it to bring prefixes."""
    was_usable: bool = False
    """Whether anything could be placed there since its process is known, or since the last verdict on it. If so,
    another router may have had it compute something, even if this one had not."""
    draining: bool = False
    proven: bool = False
    """Whether it has had a session, so that its description is more than an unchecked statement."""
    reason: str = ""
    """Why it has no session or drains, in words for people."""
    ejection: Ejection | None = None
    """Why it is given nothing new, though it is healthy; None if it is as fast as its peers."""

    def __post_init__(self) -> None:
        self.bring_times = BringTimes(self.info.token_bytes, lambda source_id: self.sources.bytes_per_s(source_id))

    @property
    def has_session(self) -> bool:
        return self.state in (WorkerState.READY, WorkerState.DRAINING)

    @property
    def is_gone(self) -> bool:
        return self.state in (WorkerState.LOST, WorkerState.LEFT)

    @property
    def takes_requests(self) -> bool:
        healthy = self.health.usable or (self.health.takes_one and not self.legs)
        return self.state is WorkerState.READY and healthy

    def view(self) -> WorkerView:
        info = self.info
        return WorkerView(
            worker_id=info.worker_id,
            model=info.model_id,
            roles=info.roles,
            ready=self.takes_requests,
            host_id=info.host_id,
            fingerprint=info.fingerprint,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            max_num_seqs=info.max_num_seqs,
            load=self.load or Load(blocks_free=info.num_blocks),
            predicted_blocks=sum(prediction.blocks for prediction in self.predictions.values()),
            predicted_tokens=sum(prediction.tokens for prediction in self.predictions.values()),
            cancelled_tokens=sum(cancelled.tokens for cancelled in self.cancelled),
            predicted_sequences=sum(prediction.num_sequences for prediction in self.predictions.values()),
            on_trial=self.state is WorkerState.READY and self.health.takes_one,
            ramp=self.health.ramp,
            barred=self.sources.barred(),
            untried=self.sources.untried(),
            handoff_times=self.sources.handoff_times,
            cache=self.cache,
            bring_times=self.bring_times if self.cache is not None and info.description is not None else None,
            capacity=info.capacity,
            num_legs=len(self.legs),
            newest_leg=self.newest_leg,
            hardware=info.hardware,
            ejected=self.ejection is not None,
        )


class WorkerTable:
    def __init__(
        self,
        health: HealthConfig,
        on_health: Callable[[str, str, HealthRecord], None] = lambda *_: None,
        on_ejection: Callable[[str, Ejection | None], None] = lambda *_: None,
        *,
        outliers: OutlierConfig | None = None,
        follow_caches: bool = False,
        replay_across_engines: bool = False,
    ) -> None:
        """`follow_caches` says that policy looks at workers' prefix caches; `replay_across_engines` is `Cluster`'s.

        `on_health(worker id, source id or "", record)` is called at every change of a health record's state,
        `on_ejection(worker id, ejection)` when a worker is ejected, and with None when it is back."""
        self._health = health
        self._outliers = OutlierDetection(outliers or OutlierConfig())
        self._on_ejection = on_ejection
        self._follow_caches = follow_caches
        self._prefix_indexes: dict[int, PrefixIndex] = defaultdict(PrefixIndex)
        """By the size of blocks."""
        self._pair_health = replace(health, recheck_s=0.0, starts_slowly=False)
        """A pair has no share of the load that could grow, and its requests show whether it works."""
        self._on_health = on_health
        self.awake = AwakeTime()
        self.has_news = False
        """Whether anything has changed, since the coordinator last unset it, by which a waiting request may find a
        place."""
        self._workers: dict[str, Worker] = {}
        self._cluster = Cluster(replay_across_engines=replay_across_engines)
        self._stale: dict[str, None] = {}
        """Workers whose views in `_cluster` are out of date."""
        self._longest_proven: int | None = None

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    def get(self, worker_id: str) -> Worker:
        try:
            return self._workers[worker_id]
        except KeyError:
            raise UnknownWorker(f"no worker {worker_id!r}") from None

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def current(self, worker_id: str, incarnation: int) -> Worker | None:
        """Returns the worker if it is this incarnation and has a session; else None, and its messages are ignored."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.info.incarnation != incarnation or not worker.has_session:
            return None
        return worker

    def join(self, info: WorkerInfo, now: float) -> None:
        """Adds a new incarnation, or one that was gone with a new description. The caller has lost the old one."""
        known = self._workers.get(info.worker_id)
        health = HealthRecord(_unprobed(self._health) if info.roles is Role.STORE else self._health, now)
        worker = Worker(info, WorkerState.JOINING, now, health, reason="no session yet")
        if self._follow_caches:
            worker.cache = KnownCache(
                info.num_blocks + info.num_tier_blocks, now, self._prefix_indexes[info.block_size]
            )
        if known is not None:
            assert not known.legs, "lose a worker before it joins again"
            self._forget_cache(known)
            same = info.is_as(known.info)
            worker.draining = known.draining and same
            if (info.roles is Role.STORE) == (known.info.roles is Role.STORE):
                worker.health = known.health
            if same:
                worker.was_usable = known.was_usable
                worker.sources, worker.ejection = known.sources, known.ejection
            else:
                self._outliers.forget(info.worker_id)
                worker.health.restarted(now)
            worker.proven = known.proven and known.view().context_tokens == worker.view().context_tokens
        self._workers[info.worker_id] = worker
        self._changed(info.worker_id)

    def set_roles(self, worker: Worker, info: WorkerInfo, now: float) -> None:
        """Takes over the roles of another description of the same process, if they have changed."""
        if worker.info.roles is info.roles:
            return
        worker.info = replace(worker.info, roles=info.roles, description=info.description)
        if worker.has_session:
            self._pair_up(worker, now)
        self._changed(worker.info.worker_id)

    def drop_role(self, worker: Worker, role: Role, now: float) -> None:
        """Takes a role from a worker that has given it up. One that has no other left is draining."""
        if rest := worker.info.roles & ~role:
            self.set_roles(worker, replace(worker.info, roles=rest), now)
        else:
            self.drain(worker, now)

    def open(self, worker: Worker, now: float) -> None:
        worker.proven = True
        self._pair_up(worker, now)
        self._set_state(worker, WorkerState.DRAINING if worker.draining else WorkerState.READY, now)

    def _pair_up(self, worker: Worker, now: float) -> None:
        """Makes the pairs that follow from the worker's roles, and drops those of roles that it had before."""
        if not worker.info.roles.takes_kv:
            worker.sources = Pairs()
        for other in self._workers.values():
            if not worker.info.roles.gives_kv and other.sources.forget(worker.info.worker_id):
                self._changed(other.info.worker_id)
            if other.has_session:
                worker.sources.meet(other.info, worker.info, self._pair_health, now)
                other.sources.meet(worker.info, other.info, self._pair_health, now)
                self._changed(other.info.worker_id)

    def drain(self, worker: Worker, now: float) -> None:
        """Marks the worker as draining. Idempotent."""
        worker.draining = True
        if worker.state is WorkerState.READY:
            self._set_state(worker, WorkerState.DRAINING, now, "draining")

    def lose(self, worker: Worker, now: float, reason: str, *, in_order: bool = False) -> None:
        """Notes that the worker's session is over; `in_order` says that the worker ended it as one that leaves."""
        worker.load = worker.load_s = worker.at_rest_since_s = None
        worker.cancelled.clear()
        self._set_state(worker, WorkerState.LEFT if in_order else WorkerState.LOST, now, reason)

    def _set_state(self, worker: Worker, state: WorkerState, now: float, reason: str = "") -> None:
        worker.state, worker.since_s, worker.reason = state, now, reason
        self._changed(worker.info.worker_id)

    # Health

    def failed(self, worker_id: str, reason: str, now: float, *, at_once: bool = False) -> None:
        if worker_id in self._workers:
            health = self._workers[worker_id].health
            with self._watch(worker_id, "", health):
                health.failed(reason, now, at_once=at_once)

    def succeeded(self, worker_id: str, now: float) -> None:
        """Notes a success of the worker. Called with every token event, so it is cheap while nothing changes."""
        if worker_id in self._workers:
            health = self._workers[worker_id].health
            if health.trusted:
                health.succeeded(now)
            else:
                with self._watch(worker_id, "", health):
                    health.succeeded(now)

    def transfer_failed(self, source: WorkerInfo, target_id: str, reason: str, now: float) -> None:
        pair = self._workers[target_id].sources.get(source)
        if pair is not None:
            with self._watch(target_id, source.worker_id, pair.health):
                pair.health.failed(reason, now)

    def transfer_succeeded(
        self, source: WorkerInfo, target_id: str, now: float, timings: types_pb2.PhaseTimings | None = None
    ) -> None:
        pair = self._workers[target_id].sources.get(source)
        if pair is not None:
            pair.timings = timings or pair.timings
            with self._watch(target_id, source.worker_id, pair.health):
                pair.health.succeeded(now)

    def handed_over(self, source: WorkerInfo, target_id: str, took_s: float, now: float) -> None:
        """Notes how long a request's handoff has taken that nothing hid."""
        if (time := self._handoff_time(source, target_id)) is not None:
            time.observe(took_s * 1000, now)

    def copied(self, source: WorkerInfo, target_id: str, num_bytes: int, copy_ms: float, now: float) -> None:
        """Notes how long a handoff's bytes were copied."""
        if (time := self._handoff_time(source, target_id)) is not None:
            time.copied(num_bytes, copy_ms, now)
            self._workers[target_id].bring_times.forget_assumed(source.worker_id)

    def handoff_tried(self, source_id: str, target_id: str, now: float) -> None:
        """Notes that a prompt is split whose handoff may go from one to the other."""
        if (time := self._handoff_time(self._workers[source_id].info, target_id)) is not None:
            time.tried(now)

    def handoff_ms(self, source: Source, target_id: str, num_tokens: float, now: float) -> float | None:
        """Returns the milliseconds that a handoff is expected to take; None while they are not known."""
        time = self._handoff_time(self._workers[source.worker_id].info, target_id)
        return None if time is None else time.expected_ms(num_tokens, source.step_tokens, source.token_ms, now)

    def _handoff_time(self, source: WorkerInfo, target_id: str) -> HandoffTime | None:
        sources = self._workers[target_id].sources
        return sources.handoff_times[source.worker_id] if sources.get(source) is not None else None

    def tick(self, now: float) -> None:
        """Lets time act on the health records: it ends pauses and slow starts. What a cache was expected to have is
        forgotten after a while, and workers are compared with their peers."""
        for worker_id, worker in self._workers.items():
            if worker.cache is not None:
                worker.cache.tick(now)
            if worker.health.ages:
                with self._watch(worker_id, "", worker.health):
                    worker.health.tick(now)
            for pair in worker.sources.unsettled:
                with self._watch(worker_id, pair.source.worker_id, pair.health):
                    pair.health.tick(now)

        self._outliers.tick(self.views, now)
        for worker_id, worker in self._workers.items():
            # Compared, and not told what has changed: what an earlier tick could not end would else stay for good.
            if worker.ejection == (ejection := self._outliers.ejection(worker_id)):
                continue
            worker.ejection = ejection
            if worker.ejection is None:
                worker.health.returned(now)
            self._changed(worker_id)
            self._on_ejection(worker_id, worker.ejection)

    @contextlib.contextmanager
    def _watch(self, worker_id: str, source_id: str, health: HealthRecord) -> Iterator[None]:
        before, failures, ramp = health.state, health.num_failures, health.ramp
        yield
        if not source_id and health.usable:
            self._workers[worker_id].was_usable = True
        if (health.state, health.num_failures, health.ramp) != (before, failures, ramp):
            self._workers[worker_id].sources.changed()
            self._changed(worker_id)
        if health.state is not before:
            self._on_health(worker_id, source_id, health)

    # Load and legs

    def set_load(self, worker: Worker, load: Load, now: float) -> None:
        if worker.load is not None and load.sequence_number <= worker.load.sequence_number:
            return
        has_more_room = worker.load is None or load.shows_more_room_than(worker.load)
        worker.load, worker.load_s, worker.spoke_s = load, now, self.awake.at(now)
        if not load.at_rest:
            worker.at_rest_since_s = None
        elif worker.at_rest_since_s is None:
            worker.at_rest_since_s = worker.spoke_s
        for prediction in worker.predictions.values():
            if prediction.tokens and now - prediction.sent_s >= REPORT_LAG_S:
                prediction.tokens = 0
                has_more_room = True
        worker.cancelled = [each for each in worker.cancelled if now - each.cancelled_s < REPORT_LAG_S]
        self._stale[worker.info.worker_id] = None
        self.has_news = self.has_news or has_more_room

    def add_leg(
        self, worker: Worker, leg: int, request_id: str, prediction: Prediction, *, in_place: bool = False
    ) -> None:
        """Notes a leg that was sent to the worker; `in_place` says that it adopts a lease of the worker's own."""
        worker.legs[leg] = request_id
        if not in_place:
            worker.newest_leg = leg
        worker.predictions[leg] = prediction
        self._stale[worker.info.worker_id] = None

    def answered(self, worker_id: str, leg: int) -> None:
        """Drops the leg's prediction: the worker has reserved its blocks, and its snapshots show them from now on."""
        self._workers[worker_id].predictions.pop(leg, None)
        self._has_more_room(worker_id)

    def drop_leg(self, worker_id: str, leg: int) -> None:
        worker = self._workers[worker_id]
        del worker.legs[leg]
        worker.predictions.pop(leg, None)
        self._has_more_room(worker_id)

    def cancel_prompt(self, worker_id: str, leg: int, num_tokens: int, now: float) -> None:
        """Notes that the worker need not compute the rest of a leg's prompt, of `num_tokens`: it is about to be told.
        Call it before `drop_leg`."""
        worker = self._workers[worker_id]
        prediction = worker.predictions.get(leg)
        if prediction is None or not prediction.tokens:  # else no snapshot counts it yet
            worker.cancelled.append(CancelledPrompt(num_tokens, now))

    def forget(self, older_than_s: float) -> None:
        """Forgets workers that have been without a session since before the time `older_than_s`."""
        for worker in self.all():
            if not worker.has_session and worker.since_s < older_than_s:
                self.drop(worker)

    def make_room(self, most: int) -> None:
        """Forgets a worker if `most` workers are known.

        It is one without a session: first one that never had any, then the one that has been without for longest.
        Raises Overloaded if all have a session.
        """
        if len(self._workers) < most:
            return
        idle = [worker for worker in self._workers.values() if not worker.has_session]
        if not idle:
            raise Overloaded(f"{most} workers are registered, and no more may be")
        self.drop(min(idle, key=lambda worker: (worker.proven, worker.since_s)))

    def _forget_cache(self, worker: Worker) -> None:
        if worker.cache is not None:
            worker.cache.close()
            if worker.cache.index.is_unused:
                del self._prefix_indexes[worker.info.block_size]

    def drop(self, worker: Worker) -> None:
        """Forgets a worker, which must have no session, and its pairs."""
        del self._workers[worker.info.worker_id]
        self._forget_cache(worker)
        self._outliers.forget(worker.info.worker_id)
        self._changed(worker.info.worker_id)
        for other in self._workers.values():
            if other.sources.forget(worker.info.worker_id):
                self._changed(other.info.worker_id)

    @property
    def cluster(self) -> Cluster:
        """Returns the cluster as policy sees it, brought up to date."""
        for worker_id in self._stale:
            worker = self._workers.get(worker_id)
            if worker is None:
                self._cluster.drop(worker_id)
            else:
                self._cluster.put(worker.view())
        self._stale.clear()
        return self._cluster

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Returns the ready workers, grouped by the `kv` part of their fingerprints.

        Stores are not among them: they follow what the others compute.

        Only workers of one group pair.
        """
        groups: dict[tuple[str, str], list[str]] = {}
        for worker_id, worker in sorted(self._workers.items()):
            if worker.state is WorkerState.READY and worker.info.roles is not Role.STORE:
                fingerprint = worker.info.fingerprint
                groups.setdefault((fingerprint.kv, fingerprint.engine), []).append(worker_id)
        return tuple(KVGroup(kv, engine, tuple(worker_ids)) for (kv, engine), worker_ids in sorted(groups.items()))

    def block_sizes(self, *, shared: bool = False) -> frozenset[int]:
        """Returns the sizes of workers' blocks; with `shared`, of those workers whose KV another could use."""
        kinds = Counter((worker.info.fingerprint.kv, worker.info.block_size) for worker in self._workers.values())
        return frozenset(size for (_, size), number in kinds.items() if number > 1 or not shared)

    def views(self) -> list[WorkerView]:
        return list(self.cluster.views.values())

    @property
    def longest_proven(self) -> int | None:
        """Returns the longest sequence, in tokens, that a decode worker with a past or present session could hold; None
        if there was no such worker.
        """
        if self._longest_proven is None:
            views = self.cluster.views
            proven = (views[worker_id] for worker_id, worker in self._workers.items() if worker.proven)
            self._longest_proven = max((view.context_tokens for view in proven if view.roles.can_decode), default=None)
        return self._longest_proven

    def _changed(self, worker_id: str) -> None:
        """Notes that a worker has changed in more than its snapshot."""
        self._longest_proven = None
        self._has_more_room(worker_id)

    def _has_more_room(self, worker_id: str) -> None:
        self._stale[worker_id] = None
        self.has_news = True
