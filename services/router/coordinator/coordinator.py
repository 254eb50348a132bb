"""The router's brain without I/O: inputs are method calls with a time, outputs are actions.

Owns: the order of things within one input (state, then placement). Never: gRPC, text, clocks. After every input, drain
`take_actions`. The rules live in `handoff.py` (events), `failures.py`, `dispatch.py` (placement) and `book.py` (legs).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from services.core.errors import (
    BatonError,
    Cancelled,
    Draining,
    DuplicateRequest,
)
from services.router import policy
from services.router.coordinator import admission, failures, handoff, invariants
from services.router.coordinator.actions import Action
from services.router.coordinator.book import Book
from services.router.coordinator.canaries import Canaries
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.dispatch import dispatch, give_up_stranded
from services.router.coordinator.events import DecodeEvent, FinishReason, PrefillEvent, WorkerInfo
from services.router.coordinator.requests import Phase, RequestSpec
from services.router.coordinator.workers import Worker, WorkerState
from services.router.policy import Load


class Coordinator:
    def __init__(self, config: CoordinatorConfig) -> None:
        self._book = Book(config)
        self._config = config
        self._canaries = Canaries(self._book)
        self._stopping = False
        self._ready = False

    def take_actions(self) -> list[Action]:
        """What is to be done, in order; each action is returned once."""
        actions, self._book.actions = self._book.actions, []
        return actions

    # Clients

    def submit(self, spec: RequestSpec, now: float) -> None:
        """Queues a request. Raises InvalidRequest, DuplicateRequest, Overloaded, DeadlineExceeded or Draining; then
        nothing is kept."""
        if self._stopping:
            raise Draining("the router is stopping", retry_after_s=self._config.retry_after_s)
        if spec.request_id in self._book.requests:
            raise DuplicateRequest(f"request {spec.request_id!r} is being served")
        max_tokens = policy.resolve_max_tokens(
            len(spec.token_ids), spec.max_tokens, self._book.workers.proven_views(), self._config.model_context_tokens
        )
        admission.admit(self._book, spec, max_tokens, now)
        self._book.add(spec, max_tokens, now)
        self._dispatch(now)

    def cancel(self, request_id: str, now: float, error: BatonError | None = None) -> None:
        """The client gave up, perhaps because its deadline passed. Unknown requests have ended already."""
        request = self._book.requests.get(request_id)
        if request is not None:
            self._book.fail(request, error or admission.passed_deadline(request, now) or Cancelled("cancelled"), now)
            self._dispatch(now)

    def finish_stopped(self, request_id: str, now: float) -> None:
        """A stop string was found in the text: the request is complete, whatever its workers still produce."""
        request = self._book.requests.get(request_id)
        if request is not None:
            self._book.finish(request, FinishReason.STOP, None, now)
            self._dispatch(now)

    def stop_admission(self) -> None:
        self._stopping = True

    # Workers

    def worker_joined(self, info: WorkerInfo, now: float) -> bool:
        """A registration. True if a session should be opened: the worker is new, restarted, or was lost."""
        workers = self._book.workers
        if info.worker_id in workers:
            known = workers.get(info.worker_id)
            if known.info.incarnation == info.incarnation and known.state is not WorkerState.LOST:
                return False
            self._lose(known, now, "restarted", crashed=not known.draining)
        workers.join(info, now)
        self._dispatch(now)
        return True

    def session_opened(self, worker_id: str, incarnation: int, now: float) -> None:
        if worker_id not in self._book.workers:
            return
        worker = self._book.workers.get(worker_id)
        if worker.info.incarnation != incarnation or worker.state is not WorkerState.JOINING:
            return
        self._book.workers.open(worker, now)
        failures.worker_alive(self._book, worker)
        self._canaries.run(now)
        self._dispatch(now)

    def worker_lost(
        self, worker_id: str, incarnation: int, now: float, *, crashed: bool, reason: str = "session lost"
    ) -> None:
        """Its session broke or fell silent (`crashed`), or it ended it in order."""
        if worker_id not in self._book.workers:
            return
        worker = self._book.workers.get(worker_id)
        if worker.info.incarnation == incarnation:
            # However one that was leaving has gone: no request is to blame for it.
            self._lose(worker, now, reason, crashed=crashed and not worker.draining)
            self._dispatch(now)

    def prefill_events(
        self, worker_id: str, incarnation: int, events: Iterable[PrefillEvent], load: Load | None, now: float
    ) -> None:
        """One message of a prefill session."""
        worker = self._book.workers.current(worker_id, incarnation)
        if worker is None:
            return
        for event in events:
            if not self._canaries.prefill_event(worker, event, now):
                handoff.prefill_event(self._book, worker, event, now)
        self._take_load(worker, load, now)

    def decode_events(
        self, worker_id: str, incarnation: int, events: Iterable[DecodeEvent], load: Load | None, now: float
    ) -> None:
        """One message of a decode session."""
        worker = self._book.workers.current(worker_id, incarnation)
        if worker is None:
            return
        for event in events:
            if not self._canaries.decode_event(worker, event, now):
                handoff.decode_event(self._book, worker, event, now)
        self._take_load(worker, load, now)

    def drain(self, worker_id: str, now: float) -> None:
        """Places nothing there any more. Raises UnknownWorker."""
        self._book.workers.drain(self._book.workers.get(worker_id), now)

    def migrate(self, worker_id: str, now: float) -> int:
        """Moves what still runs at a worker; returns how many requests. Raises UnknownWorker."""
        num_moved = failures.migrate(self._book, self._book.workers.get(worker_id), now)
        self._dispatch(now)
        return num_moved

    # Time

    def tick(self, now: float) -> None:
        """Ends what has waited too long and tries again to place the rest. Call a few times a second."""
        self._book.workers.forget(now - self._config.forget_worker_s)
        self._book.workers.tick(now)
        self._canaries.run(now)
        failures.expire_legs(self._book, now)
        give_up_stranded(self._book, now)
        self._dispatch(now)
        for request, error in admission.overdue(self._book, now):
            self._book.fail(request, error, now)

    # For shells and operators

    def held_leases(self, worker_id: str) -> list[bytes]:
        """Leases at a worker that must not expire."""
        if worker_id not in self._book.workers:
            return []
        legs = self._book.workers.get(worker_id).legs
        sources = (self._book.legs[leg].prefill for leg in legs)
        return [source.lease.lease_id for source in sources if source and source.lease and source.leg in legs]

    def workers(self) -> list[Worker]:
        """Read only."""
        return self._book.workers.all()

    def worker(self, worker_id: str) -> Worker:
        """Read only. Raises UnknownWorker."""
        return self._book.workers.get(worker_id)

    def phases(self) -> Counter[Phase]:
        """Live requests by phase."""
        return Counter(request.phase for request in self._book.requests.values())

    @property
    def num_live(self) -> int:
        return len(self._book.requests)

    @property
    def ready(self) -> bool:
        """A short request would be placed now or queued with someone to serve it. At first not before the deep checks
        of all that is there: whoever waits for a cluster to be ready gets one that works."""
        return not self._stopping and self._ready

    def context_tokens(self) -> int:
        """Longest sequence any known worker could hold."""
        contexts = [view.context_tokens for view in self._book.workers.proven_views() if view.role.can_decode]
        return max(contexts, default=self._config.model_context_tokens)

    def check(self) -> None:
        invariants.check(self._book)

    def check_idle(self) -> None:
        """Raises AssertionError if any request, leg or prediction is left."""
        invariants.check_idle(self._book)

    def _take_load(self, worker: Worker, load: Load | None, now: float) -> None:
        if load is not None:
            self._book.workers.set_load(worker, load, now)
            if load.current_step_ms >= self._config.step_timeout_s * 1000:
                self._stuck(worker, load.current_step_ms / 1000, now)
            if load.draining:
                self._book.workers.drain(worker, now)
        self._dispatch(now)

    def _lose(self, worker: Worker, now: float, reason: str, *, crashed: bool) -> None:
        if worker.state is WorkerState.LOST:
            return
        legs = dict(worker.legs)
        self._book.workers.lose(worker, now, reason)
        self._canaries.worker_gone(worker.info.worker_id)
        if crashed:
            self._book.workers.failed(worker.info.worker_id, reason, now)
        failures.worker_gone(self._book, worker, legs, now, crashed=crashed)

    def _stuck(self, worker: Worker, seconds: float, now: float) -> None:
        """Its step does not end, although heartbeats go on: as good as lost. Said again with every snapshot."""
        reason = f"a device step has run for {seconds:.0f} s"
        self._book.workers.failed(worker.info.worker_id, reason, now, at_once=True)
        self._canaries.worker_gone(worker.info.worker_id)
        if worker.legs:
            failures.worker_gone(self._book, worker, dict(worker.legs), now, crashed=True, stuck=True)

    def _dispatch(self, now: float) -> None:
        views = self._book.workers.views()
        served = any(view.ready and view.role.can_decode for view in views)
        self._ready = served and (self._ready or not self._canaries.checking)
        dispatch(self._book, now)
