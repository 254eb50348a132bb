"""The workers the router knows: state, health, newest load, legs there, and what was sent since it was measured. Pure.

Owns: worker records and the views policy sees. Never: requests (it keeps leg numbers only), sessions, clocks, or what
counts as a failure.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.core.errors import UnknownWorker
from services.router.coordinator.events import WorkerInfo
from services.router.coordinator.pairs import Pairs
from services.router.health import HealthConfig, HealthRecord
from services.router.policy import Load, WorkerView

REPORT_LAG_S = 0.1
"""A snapshot this much younger than a command is taken to count the command's tokens."""


class WorkerState(enum.Enum):
    JOINING = "joining"
    """Registered, session not yet open."""
    READY = "ready"
    DRAINING = "draining"
    """Finishes what it has; nothing is placed there."""
    LOST = "lost"
    """Its session broke. Remembered for a while: requests it could hold are not refused as too long."""


@dataclass(slots=True)
class Prediction:
    """What a command will take, until the worker's own numbers show it."""

    blocks: int
    tokens: int
    sent_s: float


@dataclass(slots=True)
class Worker:
    info: WorkerInfo
    state: WorkerState
    since_s: float
    health: HealthRecord
    sources: Pairs = field(default_factory=Pairs)
    """Whose leases it can take over."""
    load: Load | None = None
    load_s: float | None = None
    legs: dict[int, str] = field(default_factory=dict)
    """Current legs there, and their requests' ids."""
    predictions: dict[int, Prediction] = field(default_factory=dict)
    draining: bool = False
    proven: bool = False
    """It has had a session: what it says of itself is not only a claim."""
    reason: str = ""
    """Why it has no session, or drains; for people."""

    @property
    def has_session(self) -> bool:
        return self.state in (WorkerState.READY, WorkerState.DRAINING)

    @property
    def takes_requests(self) -> bool:
        healthy = self.health.usable or (self.health.takes_one and not self.legs)
        return self.state is WorkerState.READY and healthy

    def view(self) -> WorkerView:
        info = self.info
        return WorkerView(
            worker_id=info.worker_id,
            role=info.role,
            ready=self.takes_requests,
            host_id=info.host_id,
            layout=info.layout,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            max_num_seqs=info.max_num_seqs,
            load=self.load or Load(blocks_free=info.num_blocks),
            predicted_blocks=sum(prediction.blocks for prediction in self.predictions.values()),
            predicted_tokens=sum(prediction.tokens for prediction in self.predictions.values()),
            predicted_sequences=len(self.predictions),
            on_trial=self.state is WorkerState.READY and self.health.takes_one,
            ramp=self.health.ramp,
            barred=self.sources.barred(),
            untried=self.sources.untried(),
        )


class WorkerTable:
    def __init__(
        self, health: HealthConfig, on_health: Callable[[str, str, HealthRecord], None] = lambda *_: None
    ) -> None:
        """`on_health(worker id, source id or "", record)` hears of every change of state."""
        self._health = health
        self._on_health = on_health
        self._workers: dict[str, Worker] = {}
        self._views: dict[str, WorkerView] = {}

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
        """The worker if it is this incarnation and has a session, else None: its messages are void."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.info.incarnation != incarnation or not worker.has_session:
            return None
        return worker

    def join(self, info: WorkerInfo, now: float) -> None:
        """A new incarnation, or a new description of a lost one. The caller has lost the old one."""
        known = self._workers.get(info.worker_id)
        worker = Worker(info, WorkerState.JOINING, now, HealthRecord(self._health, now), reason="no session yet")
        if known is not None:
            assert not known.legs, "lose a worker before it joins again"
            same = known.info.incarnation == info.incarnation
            worker.draining = known.draining and same
            worker.health = known.health
            if same:
                worker.sources = known.sources
            else:
                worker.health.restarted(now)
            worker.proven = known.proven and known.view().context_tokens == worker.view().context_tokens
        self._workers[info.worker_id] = worker
        self._changed(info.worker_id)

    def open(self, worker: Worker, now: float) -> None:
        worker.proven = True
        for other in self._workers.values():
            if other.has_session:
                worker.sources.meet(other.info, worker.info, self._health, now)
                other.sources.meet(worker.info, other.info, self._health, now)
                self._changed(other.info.worker_id)
        self._set_state(worker, WorkerState.DRAINING if worker.draining else WorkerState.READY, now)

    def drain(self, worker: Worker, now: float) -> None:
        """Idempotent."""
        worker.draining = True
        if worker.state is WorkerState.READY:
            self._set_state(worker, WorkerState.DRAINING, now, "draining")

    def lose(self, worker: Worker, now: float, reason: str) -> None:
        worker.load = worker.load_s = None
        self._set_state(worker, WorkerState.LOST, now, reason)

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
        """Called with every token: cheap while nothing changes."""
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

    def transfer_succeeded(self, source: WorkerInfo, target_id: str, now: float, timings: object = None) -> None:
        pair = self._workers[target_id].sources.get(source)
        if pair is not None:
            pair.timings = timings or pair.timings
            with self._watch(target_id, source.worker_id, pair.health):
                pair.health.succeeded(now)

    def tick(self, now: float) -> None:
        """Time alone ends pauses and slow starts."""
        for worker_id, worker in self._workers.items():
            with self._watch(worker_id, "", worker.health):
                worker.health.tick(now)
            for pair in worker.sources.all():
                with self._watch(worker_id, pair.source.worker_id, pair.health):
                    pair.health.tick(now)

    @contextlib.contextmanager
    def _watch(self, worker_id: str, source_id: str, health: HealthRecord) -> Iterator[None]:
        before, failures = health.state, health.num_failures
        yield
        if (health.state, health.num_failures) != (before, failures):
            self._changed(worker_id)
        if health.state is not before:
            self._on_health(worker_id, source_id, health)

    # Load and legs

    def set_load(self, worker: Worker, load: Load, now: float) -> None:
        if worker.load is not None and load.sequence_number <= worker.load.sequence_number:
            return
        worker.load, worker.load_s = load, now
        for prediction in worker.predictions.values():
            if now - prediction.sent_s >= REPORT_LAG_S:
                prediction.tokens = 0
        self._changed(worker.info.worker_id)

    def add_leg(self, worker: Worker, leg: int, request_id: str, prediction: Prediction) -> None:
        worker.legs[leg] = request_id
        worker.predictions[leg] = prediction
        self._changed(worker.info.worker_id)

    def answered(self, worker_id: str, leg: int) -> None:
        """The worker has reserved the leg's blocks: from here on its snapshots show them."""
        self._workers[worker_id].predictions.pop(leg, None)
        self._changed(worker_id)

    def drop_leg(self, worker_id: str, leg: int) -> None:
        worker = self._workers[worker_id]
        del worker.legs[leg]
        worker.predictions.pop(leg, None)
        self._changed(worker_id)

    def forget(self, older_than_s: float) -> None:
        """Lost workers, and those that registered and never opened a session, since before `older_than_s`."""
        for worker in self.all():
            if not worker.has_session and worker.since_s < older_than_s:
                del self._workers[worker.info.worker_id]
                self._changed(worker.info.worker_id)
                for other in self._workers.values():
                    other.sources.forget(worker.info.worker_id)

    def view(self, worker: Worker) -> WorkerView:
        worker_id = worker.info.worker_id
        if worker_id not in self._views:
            self._views[worker_id] = worker.view()
        return self._views[worker_id]

    def views(self) -> list[WorkerView]:
        return [self.view(worker) for worker in self._workers.values()]

    def proven_views(self) -> list[WorkerView]:
        """Of those that have had a session, lost ones too."""
        return [self.view(worker) for worker in self._workers.values() if worker.proven]

    def _changed(self, worker_id: str) -> None:
        self._views.pop(worker_id, None)
