"""The workers the router knows: state, newest load, legs there, and what was sent since the load was measured. Pure.

Owns: worker records and the views policy sees. Never: requests (it keeps leg numbers only), sessions, clocks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from services.core.errors import UnknownWorker
from services.router.coordinator.events import WorkerInfo
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
    load: Load | None = None
    load_s: float | None = None
    legs: dict[int, str] = field(default_factory=dict)
    """Current legs there, and their requests' ids."""
    predictions: dict[int, Prediction] = field(default_factory=dict)
    last_failure_s: float | None = None
    draining: bool = False
    proven: bool = False
    """It has had a session: what it says of itself is not only a claim."""
    reason: str = ""
    """Why it is not ready; for people."""

    @property
    def has_session(self) -> bool:
        return self.state in (WorkerState.READY, WorkerState.DRAINING)

    def view(self) -> WorkerView:
        info = self.info
        return WorkerView(
            worker_id=info.worker_id,
            role=info.role,
            ready=self.state is WorkerState.READY,
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
            last_failure_s=self.last_failure_s,
        )


class WorkerTable:
    def __init__(self) -> None:
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
        worker = Worker(info, WorkerState.JOINING, now, reason="no session yet")
        if known is not None:
            assert not known.legs, "lose a worker before it joins again"
            worker.last_failure_s = known.last_failure_s
            worker.draining = known.draining and known.info.incarnation == info.incarnation
            worker.proven = known.proven and known.view().context_tokens == worker.view().context_tokens
        self._workers[info.worker_id] = worker
        self._changed(info.worker_id)

    def open(self, worker: Worker, now: float) -> None:
        worker.proven = True
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

    def note_failure(self, worker_id: str, now: float) -> None:
        if worker_id in self._workers:
            self._workers[worker_id].last_failure_s = now
            self._changed(worker_id)

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
