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
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    NoWorker,
    Overloaded,
)
from services.router import policy
from services.router.coordinator import failures, handoff, invariants
from services.router.coordinator.actions import Action
from services.router.coordinator.book import Book
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.dispatch import can_be_served, dispatch
from services.router.coordinator.events import DecodeEvent, FinishReason, PrefillEvent, WorkerInfo
from services.router.coordinator.requests import Phase, Request, RequestSpec
from services.router.coordinator.workers import Worker, WorkerState
from services.router.policy import Load


class Coordinator:
    def __init__(self, config: CoordinatorConfig) -> None:
        self._book = Book(config)
        self._config = config
        self._stopping = False

    def take_actions(self) -> list[Action]:
        """What is to be done, in order; each action is returned once."""
        actions, self._book.actions = self._book.actions, []
        return actions

    # Clients

    def submit(self, spec: RequestSpec, now: float) -> None:
        """Queues a request. Raises InvalidRequest, DuplicateRequest, Overloaded or Draining; then nothing is kept."""
        if self._stopping:
            raise Draining("the router is stopping", retry_after_s=self._config.retry_after_s)
        if spec.request_id in self._book.requests:
            raise DuplicateRequest(f"request {spec.request_id!r} is being served")
        max_tokens = policy.resolve_max_tokens(
            len(spec.token_ids), spec.max_tokens, self._book.workers.proven_views(), self._config.model_context_tokens
        )
        if len(self._book.queue) >= self._config.max_queue:
            raise Overloaded("the queue is full", retry_after_s=self._config.retry_after_s)
        self._book.add(spec, max_tokens, now)
        self._dispatch(now)

    def cancel(self, request_id: str, now: float, error: BatonError | None = None) -> None:
        """The client gave up, perhaps because its deadline passed. Unknown requests have ended already."""
        request = self._book.requests.get(request_id)
        if request is not None:
            self._book.fail(request, error or _passed_deadline(request, now) or Cancelled("cancelled"), now)
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
            self._lose(known, now, "restarted", crashed=True)
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
        self._dispatch(now)

    def worker_lost(
        self, worker_id: str, incarnation: int, now: float, *, crashed: bool, reason: str = "session lost"
    ) -> None:
        """Its session broke or fell silent (`crashed`), or it ended it in order."""
        if worker_id not in self._book.workers:
            return
        worker = self._book.workers.get(worker_id)
        if worker.info.incarnation == incarnation:
            self._lose(worker, now, reason, crashed=crashed)
            self._dispatch(now)

    def prefill_events(
        self, worker_id: str, incarnation: int, events: Iterable[PrefillEvent], load: Load | None, now: float
    ) -> None:
        """One message of a prefill session."""
        worker = self._book.workers.current(worker_id, incarnation)
        if worker is None:
            return
        for event in events:
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
        failures.expire_legs(self._book, now)
        self._dispatch(now)
        for request in list(self._book.requests.values()):
            error = self._overdue(request, now)
            if error is not None:
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
        """A short request would be placed now or queued with someone to serve it."""
        return not self._stopping and any(view.ready and view.role.can_decode for view in self._book.workers.views())

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
            if load.draining:
                self._book.workers.drain(worker, now)
        self._dispatch(now)

    def _lose(self, worker: Worker, now: float, reason: str, *, crashed: bool) -> None:
        if worker.state is WorkerState.LOST:
            return
        legs = dict(worker.legs)
        self._book.workers.lose(worker, now, reason)
        if crashed and legs:
            self._book.workers.note_failure(worker.info.worker_id, now)
        failures.worker_gone(self._book, worker, legs, now, crashed=crashed)

    def _dispatch(self, now: float) -> None:
        dispatch(self._book, now)

    def _overdue(self, request: Request, now: float) -> BatonError | None:
        if (error := _passed_deadline(request, now)) is not None:
            return error
        if request.phase not in (Phase.QUEUED, Phase.PARKED):
            request.unserved_since_s = None
            return None
        if can_be_served(self._book, request):
            request.unserved_since_s = None
        elif request.unserved_since_s is None:
            request.unserved_since_s = now
        elif now - request.unserved_since_s >= self._config.no_worker_timeout_s:
            return NoWorker("no worker that could serve this is ready", retry_after_s=self._config.retry_after_s)
        if now - request.waiting_since_s >= self._config.queue_timeout_s:
            return Overloaded("no room became free in time", retry_after_s=self._config.retry_after_s)
        return None


def _passed_deadline(request: Request, now: float) -> DeadlineExceeded | None:
    deadline_s = request.spec.deadline_s
    return DeadlineExceeded("the deadline passed") if deadline_s is not None and now >= deadline_s else None
