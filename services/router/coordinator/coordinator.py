"""Makes the router's decisions without I/O: inputs are method calls with a time, outputs are actions.

Owns: that inputs change state only, and mark that placement is due; `place` is called once per turn of the event loop.
Never: gRPC, text, clocks. The caller takes the actions (`take_actions`) after every input and every `place`. The rules
are in `admission.py`, `placement.py`, `handoff.py` (events of workers), `silent_legs.py`, `canaries.py` and
`book.py` (legs and phases).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from services.core.errors import (
    BatonError,
    Cancelled,
    Draining,
    WorkerIdInUse,
)
from services.core.hashing import ShortHash
from services.router import policy
from services.router.coordinator import admission, handoff, invariants, parking, silent_legs
from services.router.coordinator.book import Book
from services.router.coordinator.canaries import Canaries
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.events import (
    Action,
    ExpectedRequest,
    GroupsChanged,
    KVGroup,
    LegEvent,
    LoadingWorker,
    RequestSpec,
    WorkerInfo,
)
from services.router.coordinator.placement import give_up_stranded, place_all, split_break_even
from services.router.coordinator.progress import LiveProgress, QueuePlaces, progress_of
from services.router.coordinator.request import LiveStage, Phase, PlacedPark, Request
from services.router.coordinator.workers import Worker, WorkerState
from services.router.policy import Load, Share, VainAttempt

TICK_S = 0.1
"""How often `tick` is to be called, in seconds."""
CLIENTS_CLOCK_S = 0.1
"""A cancel that comes at most this long before the deadline counts as a passed deadline: the client's clock started
before the request reached this process."""


class Coordinator:
    def __init__(self, config: CoordinatorConfig) -> None:
        self._book = Book(config)
        self.config = config
        self.workers = self._book.workers
        """What is known of workers. Callers only read it."""
        self.loading = self._book.loading
        """The workers that say that they load. Callers only read it."""
        self.verdicts = self._book.verdicts
        """What was found of workers, here or by others, and the epoch in which the blocks of new requests are named.
        Callers only read it."""
        self.awake = self._book.awake
        """The time by which workers are judged. Each tick is preceded by a call of `delayed`."""
        self._canaries = Canaries(self._book)
        self._places = QueuePlaces(self._book)
        self._stopping: BatonError | None = None
        """The error that new requests get; None while requests are admitted."""
        self._ready = False
        self._groups: tuple[KVGroup, ...] = ()

    def take_actions(self) -> list[Action]:
        """Returns what is to be done, in order. Each action is returned once."""
        actions, self._book.actions = self._book.actions, []
        return actions

    # Clients

    def submit(self, spec: RequestSpec, now: float) -> None:
        """Queues a request.

        Raises InvalidRequest, Overloaded, DeadlineExceeded, or the error given to `stop_admission`; then nothing is
        kept.
        """
        self._raise_if_stopping()
        assert not self._book.of_id(spec.request_id), "the router never uses an id again"
        max_tokens = policy.resolve_max_tokens(len(spec.token_ids), spec.max_tokens, self.context_tokens())
        admission.admit(self._book, spec, max_tokens, now)
        self._book.add(spec, max_tokens, now)

    def expect(self, expected: ExpectedRequest, now: float) -> Share:
        """Keeps a place in the queue while a prompt is tokenised; `arrived`, with what this returns, gives it back.

        Raises Overloaded, DeadlineExceeded, or the error given to `stop_admission`; then nothing is kept.
        """
        self._raise_if_stopping()
        room = max(1, self.context_tokens() - expected.fewest_tokens)
        max_tokens = room if expected.max_tokens is None else min(room, expected.max_tokens)
        admission.expect(self._book, expected, max_tokens, now)
        return self._book.expect(expected, now)

    def arrived(self, share: Share) -> None:
        """Gives a place back that `expect` has kept: the prompt is tokenised, or nobody wants it any more."""
        self._book.arrived(share)

    def cancel(self, request_id: str, now: float, error: BatonError | None = None) -> None:
        """Ends a request because its client gave up, perhaps because its deadline passed.

        `error` is the reason, if it is known. Without effect for an unknown request: it has ended already.
        """
        if family := self._book.of_id(request_id):
            with self._book.isolated("action", family[0], now):
                late = admission.passed_deadline(family[0], now + CLIENTS_CLOCK_S)
                self._book.fail_surely(family[0], error or late or Cancelled("cancelled"), now)

    def finish_stopped(self, request_id: str, now: float, index: int = 0) -> None:
        """Finishes an answer because a stop string was found in its text, whatever its workers still produce."""
        for request in self._book.of_id(request_id):
            for place, answer in enumerate(request.answers):
                if answer.index == index and not answer.over:
                    with self._book.isolated("event", request, now):
                        handoff.stop_answer(self._book, request, place, now)

    def block_sizes_to_hash(self) -> frozenset[int]:
        """Returns the sizes of blocks for which prompts' hashes are of use: to terms of policy, or, where none looks at
        them, to workers that could bring prefixes from one another."""
        rules = self.config.policy
        if not rules.hash_prompts:
            return frozenset()
        return self._book.workers.block_sizes(shared=not rules.looks_at_prompts)

    def stop_admission(self, why: BatonError | None = None) -> None:
        """Refuses all requests from now on with the error `why`; by default it says that the router is stopping."""
        self._stopping = why or Draining("the router is stopping", retry_after_s=self.config.retry_after_s)

    def _raise_if_stopping(self) -> None:
        if self._stopping is not None:
            raise self._stopping.with_traceback(None)  # it is raised again and again, and must not collect frames

    # Workers

    def worker_joined(self, info: WorkerInfo, now: float) -> bool:
        """Takes a registration. Returns whether to open a session: the worker is new, restarted, or was lost.

        Nothing of a worker that has a session, or is about to, is changed: whoever registers may say that it is that
        worker, and what it says of itself in its session counts. Raises WorkerIdInUse while another process of that
        name has a session, or one of another description: the one that is known is alive, or has not been silent for
        long enough to be lost. Raises Overloaded if `max_workers` workers are known and all have sessions.
        """
        workers = self._book.workers
        if info.worker_id in workers:
            known = workers.get(info.worker_id)
            if not info.is_as(known.info):
                _check_gone(known)
            elif not known.is_gone:
                return False
            self._lose(known, now, "restarted", crashed=not known.draining)
        else:
            workers.make_room(self._book.config.max_workers)
        workers.join(info, now)
        self._book.loading.loaded(info.worker_id)
        return True

    def worker_loading(self, worker: LoadingWorker, now: float) -> None:
        """Takes what a worker says that loads. Without effect while a process of its name has a session, or is about to
        have one."""
        workers = self._book.workers
        if worker.worker_id not in workers or workers.get(worker.worker_id).is_gone:
            self._book.loading.heard(worker, now)

    def worker_described(self, info: WorkerInfo, now: float) -> None:
        """Takes over the roles that a worker states in its session. The legs that it has go on.

        Without effect if that incarnation has no session, and none is about to open.
        """
        if info.worker_id in self._book.workers:
            worker = self._book.workers.get(info.worker_id)
            if worker.info.incarnation == info.incarnation and not worker.is_gone:
                self._book.workers.set_roles(worker, info, now)

    def check_gone(self, worker_id: str) -> None:
        """Raises WorkerIdInUse if a worker of that name has a session: only that shows that its process is alive."""
        if worker_id in self._book.workers:
            _check_gone(self._book.workers.get(worker_id))

    def withdraw(self, worker_id: str, now: float) -> bool:
        """Forgets a worker whose name another worker takes over. Returns whether it was known.

        Raises WorkerIdInUse while the known one has a session: only a session shows that its process is alive.
        """
        workers = self._book.workers
        if worker_id not in workers:
            return False
        known = workers.get(worker_id)
        _check_gone(known)
        self._lose(known, now, "its name is another's", crashed=not known.draining)
        workers.drop(known)
        return True

    def session_opened(self, worker_id: str, incarnation: int, now: float) -> None:
        if worker_id not in self._book.workers:
            return
        worker = self._book.workers.get(worker_id)
        if worker.info.incarnation != incarnation or worker.state is not WorkerState.JOINING:
            return
        self._book.workers.open(worker, now)
        with self._book.isolated("session", None, now):
            handoff.worker_alive(self._book, worker)
        with self._book.isolated("session", None, now):
            self._canaries.run(now)

    def worker_lost(
        self, worker_id: str, incarnation: int, now: float, *, crashed: bool, reason: str = "session lost"
    ) -> None:
        """Notes that a worker's session is over: it broke or fell silent (`crashed`), or the worker ended it."""
        if worker_id not in self._book.workers:
            return
        worker = self._book.workers.get(worker_id)
        if worker.info.incarnation == incarnation:
            # A draining worker was about to leave, so its loss counts as no crash, however it came about.
            reason = reason if crashed else "it left in order"
            self._lose(worker, now, reason, crashed=crashed and not worker.draining, in_order=not crashed)

    def worker_events(
        self, worker_id: str, incarnation: int, events: Iterable[LegEvent], load: Load | None, now: float
    ) -> None:
        """Handles the events and the snapshot of one message of a worker's session.

        Without effect if that incarnation has no session any more.
        """
        worker = self._book.workers.current(worker_id, incarnation)
        if worker is None:
            return
        for event in events:
            # Looked up before: a handler that fails may have ended the leg, but not yet settled or ended its request.
            found = self._book.leg_at(worker, event.leg)
            try:
                if found is None and self._canaries.event(worker, event, now):
                    continue
                if found is not None and isinstance(found[1], PlacedPark):
                    parking.leg_event(self._book, worker, event, found[0], found[1], now)
                else:
                    handoff.leg_event(self._book, worker, event, found, now)
            except Exception as error:
                self._spoil(worker, event.leg, found[0] if found else None, "event", error, now)
        self._take_load(worker, load, now)

    def cache_changed(
        self,
        worker_id: str,
        incarnation: int,
        *,
        whole: bool,
        stored: Collection[ShortHash],
        removed: Iterable[ShortHash],
    ) -> None:
        """Takes over what a worker tells of its prefix cache (see `KnownCache.tell`).

        Without effect if that incarnation has no session any more, or policy does not look at caches.
        """
        worker = self._book.workers.current(worker_id, incarnation)
        if worker is not None and worker.cache is not None:
            worker.cache.tell(whole=whole, stored=stored, removed=removed)

    def verdicts_heard(self, num_of: Mapping[int, int], now: float) -> None:
        """Takes over what others have found of workers: what one router finds wrong is wrong for all."""
        with self._book.isolated("event", None, now):
            self._canaries.heard(num_of, now)

    def live_legs(self, worker_id: str, incarnation: int, newest_leg: int, legs: Collection[int], now: float) -> None:
        """Compares the legs that a worker's heartbeat lists with those that the router believes to be there.

        `newest_leg` is the highest leg number that the worker has received.
        """
        worker = self._book.workers.current(worker_id, incarnation)
        if worker is not None:
            silent_legs.reconcile(self._book, worker, newest_leg, legs, self._canaries.has_leg, now)

    def spoil_leg(self, at: WorkerInfo, leg: int, where: str, error: Exception, now: float) -> None:
        """Reports a defect met with a command or an event of a worker's leg.

        Ends the canary or request that the leg belongs to, and no other: a leg of another worker is left alone.
        """
        worker = self._book.workers.current(at.worker_id, at.incarnation)
        found = self._book.leg_at(worker, leg) if worker is not None else None
        self._spoil(worker, leg, found[0] if found else None, where, error, now)

    def _spoil(
        self, worker: Worker | None, leg: int, request: Request | None, where: str, error: Exception, now: float
    ) -> None:
        if worker is not None:
            with self._book.isolated(where, None, now):
                self._canaries.give_up(worker, leg)
        self._book.spoil(where, request, error, now)

    def drain(self, worker_id: str, now: float) -> None:
        """Places nothing on the worker any more. Raises UnknownWorker."""
        self._book.workers.drain(self._book.workers.get(worker_id), now)

    def migrate(self, worker_id: str, now: float) -> int:
        """Ends all legs at a worker, so that their requests go on elsewhere. Returns how many requests these are.

        Raises UnknownWorker.
        """
        return handoff.migrate(self._book, self._book.workers.get(worker_id), now)

    # Time

    @property
    def placement_is_due(self) -> bool:
        """Returns whether anything has changed since the last `place` by which a waiting request may find a place."""
        return self._book.placement_is_due or self._book.workers.has_news

    def place(self, now: float) -> None:
        """Places waiting requests and handoffs, as far as there is room.

        To be called once in each turn of the event loop after which it is due, however many inputs that turn had: it
        looks at everything that waits.
        """
        book = self._book
        if not self.placement_is_due:
            return
        book.placement_is_due = book.workers.has_news = False
        if len(book.queue.parked) or len(book.queue) or not self._ready:  # else no view of a worker needs to be renewed
            self._ready = self._serves() and (self._ready or not self._canaries.checking)
        with book.isolated("placement", None, now):
            place_all(book, now)

    def tick(self, now: float) -> None:
        """Does the timed work: ends what has waited too long, looks at health, runs canaries, forgets workers that are
        gone, and marks placement as due.

        To be called ten times a second: of the time between two calls, what exceeds half a second counts as time in
        which the router was stopped and heard no worker (`core/awake.py`). A defect in one part does not keep the other
        parts from running.
        """
        book = self._book
        book.awake.at(now)
        parts: tuple[Callable[[], None], ...] = (
            lambda: book.loading.tick(now),
            lambda: book.workers.forget(now - self.config.forget_worker_s),
            lambda: book.shares.forget_idle(now),
            lambda: book.workers.tick(now),
            lambda: self._canaries.run(now),
            lambda: silent_legs.expire_legs(book, now),
            lambda: give_up_stranded(book, now),
            lambda: admission.end_overdue(book, now),
            self._look_at_groups,
        )
        for part in parts:
            with book.isolated("tick", None, now):
                part()
        book.placement_is_due = True
        self._ready = self._ready and self._serves()

    # For shells and operators

    def held_leases(self, worker_id: str) -> list[bytes]:
        """Returns the leases at a worker that must not expire: those that no decode worker has admitted yet.

        A decode worker fetches a handoff as soon as it has admitted it. From then on the source's own clocks judge the
        handoff: a lease that is neither fetched nor released any more expires, however healthy both workers look.
        """
        if worker_id not in self._book.workers:
            return []
        lease_ids = []
        for leg in self._book.workers.get(worker_id).legs:
            request = self._book.legs.get(leg)
            if request is None or request.prefill is None or request.prefill.leg != leg:
                continue
            if request.prefill.lease is not None and request.phase is not Phase.DECODING:
                lease_ids.append(request.prefill.lease.lease_id)
        return lease_ids

    def split_break_even(self, now: float) -> policy.BreakEven | None:
        """Returns from how many uncached tokens on a prompt would be split now; None if that is not chosen by costs, or
        they are not known."""
        return split_break_even(self._book, now)

    def prefix_break_even(self) -> policy.PrefixBreakEven | None:
        """Returns from how many tokens on a prefix would be brought to the worker where a prompt would begin first. Of
        one to which prefixes were brought already, it is known rather than assumed, so one of these comes before.

        It is None if prefixes are not shared, or costs are not known."""
        everyone = self._book.workers.cluster.everyone
        model = next((view.model for view in everyone.views()), "")
        job = policy.Job(num_tokens=1, total_tokens=2, model=model)
        first = policy.shortest_queue(job, everyone, policy.HandoffsInFlight())
        if first is None:
            return None
        names = [first.worker_id, *(view.worker_id for view in everyone.views() if view.model == model)]
        found = [even for name in names if (even := self._book.prefixes.break_even(self._book.workers.get(name)))]
        return min(found, key=lambda even: not even.num_seen, default=None)

    def phases(self) -> Counter[Phase]:
        """Returns the number of live requests by phase."""
        return +self._book.num_in

    def wait_of(self, request_id: str) -> tuple[float, VainAttempt | None] | None:
        """Returns since when a live request has been waiting for a worker, and the newest attempt that was noted; None
        if it waits for none."""
        for request in self._book.of_id(request_id):
            if request.phase in (Phase.QUEUED, Phase.PARKED):
                return request.waiting_since_s, request.story.vain_attempt
        return None

    def stage_of(self, request_id: str) -> LiveStage | None:
        """Returns where a live request is now; None if none of that id lives. Where its answers have been begun again
        by themselves, the first of them counts."""
        request = next(iter(self._book.of_id(request_id)), None)
        if request is None:
            return None
        since_s = request.phase_since_s
        if request.phase in (Phase.PARKED, Phase.BINDING) and request.placing_since_s is not None:
            since_s = request.placing_since_s
        return LiveStage(request.phase, since_s, request.story.cached_tokens, request.story.num_retries)

    def progress_of(self, request_id: str, now: float) -> LiveProgress | None:
        """Returns how far a live request has come, judged as `stage_of` does; None if it has ended."""
        request = next(iter(self._book.of_id(request_id)), None)
        return None if request is None else progress_of(request, self._places, len(self._book.queue), now)

    @property
    def num_live(self) -> int:
        return len(self._book.requests)

    @property
    def num_expected(self) -> int:
        """Returns how many requests have prompts that are being tokenised."""
        return self._book.num_expected

    @property
    def ready(self) -> bool:
        """Returns whether the router takes requests and a ready worker could serve a short one.

        At first it is False until all workers and pairs that are there have been checked by canaries, so that a cluster
        that is ready also works.
        """
        return self._stopping is None and self._ready

    @property
    def queue_share(self) -> float:
        """Returns how full the queue is, from 0 to 1."""
        return len(self._book.queue) / max(1, self.config.max_queue)

    def context_tokens(self) -> int:
        """Returns the longest sequence, in tokens, that any worker with a past or present session could hold, if the
        model was made for it: a worker may say anything of itself.

        Without such a worker it is the model's own bound.
        """
        longest, own = self._book.workers.longest_proven, self.config.model_context_tokens
        return own if longest is None else min(longest, own)

    def check(self) -> None:
        invariants.check(self._book)

    def check_idle(self) -> None:
        """Raises AssertionError if any request, leg or prediction is left."""
        invariants.check_idle(self._book)

    def _serves(self) -> bool:
        """Returns whether any ready worker decodes."""
        return bool(self._book.workers.cluster.everyone.longest_sequence)

    def _take_load(self, worker: Worker, load: Load | None, now: float) -> None:
        if load is not None:
            with self._book.isolated("event", None, now):
                self._take_snapshot(worker, load, now)
            if self._book.queue.is_news(worker.info.worker_id, now):
                self._book.placement_is_due = True

    def _take_snapshot(self, worker: Worker, load: Load, now: float) -> None:
        self._book.workers.set_load(worker, load, now)
        if load.current_step_ms >= self.config.step_timeout_s * 1000:
            self._stuck(worker, load.current_step_ms / 1000, now)
        if load.draining:
            self._book.workers.drain(worker, now)

    def _lose(self, worker: Worker, now: float, reason: str, *, crashed: bool, in_order: bool = False) -> None:
        if worker.is_gone:
            return
        legs, isolated = dict(worker.legs), self._book.isolated
        self._book.workers.lose(worker, now, reason, in_order=in_order)
        with isolated("session", None, now):
            self._canaries.worker_gone(worker.info.worker_id)
        if crashed:
            with isolated("session", None, now):
                self._book.workers.failed(worker.info.worker_id, reason, now)
        handoff.worker_gone(self._book, worker, legs, now, crashed=crashed, in_order=in_order)

    def _stuck(self, worker: Worker, seconds: float, now: float) -> None:
        """Treats a worker whose step does not end as lost, although its heartbeats go on.

        Called with every snapshot that shows such a step. `seconds` is how long the step has run.
        """
        reason = f"a device step has run for {seconds:.0f} s"
        self._book.workers.failed(worker.info.worker_id, reason, now, at_once=True)
        self._canaries.worker_gone(worker.info.worker_id)
        if worker.legs:
            handoff.worker_gone(self._book, worker, dict(worker.legs), now, crashed=True, stuck=True)

    def _look_at_groups(self) -> None:
        before, self._groups = self._groups, self._book.workers.kv_groups()
        if self._groups != before and max(len(self._groups), len(before)) > 1:
            self._book.actions.append(GroupsChanged(self._groups))


def _check_gone(worker: Worker) -> None:
    """Raises WorkerIdInUse while the worker has a session: only a session shows that its process is alive."""
    if worker.has_session:
        raise WorkerIdInUse(f"another process is worker {worker.info.worker_id!r}, and it lives")
