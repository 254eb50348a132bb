"""Deep checks: sends canaries, hears what workers make of them, and judges by it. Pure.

Owns: which canaries are under way, and what the end of each says of whom. Never: requests, queues, metrics. A canary is
never retried or moved and is given up after `canary_timeout_s`; a worker has at most one at a time, and a full one may
refuse it without harm.
"""

from __future__ import annotations

from services.core.errors import BatonError, DeadlineExceeded, Draining
from services.router.coordinator.actions import CancelDecode, CancelPrefill, HandoffRef
from services.router.coordinator.book import Book
from services.router.coordinator.canary import Canary, decode_command, new_canary, prefill_command
from services.router.coordinator.events import (
    DecodeAdmitted,
    DecodeEvent,
    DecodeRefused,
    ImportFailed,
    ImportReady,
    LegFailed,
    PrefillEvent,
    PrefillStarted,
    Tokens,
    WorkerInfo,
)
from services.router.coordinator.failures import FATAL, is_leaving, is_the_pairs, leaves
from services.router.coordinator.workers import Worker, WorkerState
from services.router.health import Health


class Canaries:
    def __init__(self, book: Book) -> None:
        self._book = book
        self._legs: dict[int, Canary] = {}
        self._live: list[Canary] = []
        self._num_sent = 0
        self.checking = False
        """Something that is there has not been checked yet."""

    # When

    def run(self, now: float) -> None:
        """Gives up those that take too long, and sends those that are due. A few times a second."""
        for canary in list(self._live):
            if now - canary.started_s >= self._book.config.canary_timeout_s:
                self._timed_out(canary, now)
        ready = {worker.info.worker_id: worker for worker in self._book.workers.all() if _open(worker)}
        for worker in ready.values():
            if worker.health.wants_probe(now) and self._is_free(worker.info):
                worker.health.probed(now)
                whole = worker.info.role.can_decode
                self._start(None if whole else worker.info, worker.info if whole else None, now)
        for target in ready.values():
            for pair in target.sources.all():
                source = ready.get(pair.source.worker_id)
                if source is None or source.info.incarnation != pair.source.incarnation:
                    continue
                both_work = source.health.usable and target.health.usable
                free = self._is_free(source.info) and self._is_free(target.info)
                if both_work and free and pair.health.wants_probe(now):
                    pair.health.probed(now)
                    self._start(source.info, target.info, now)
        self.checking = any(self._unchecked(worker, ready, now) for worker in ready.values())

    def _unchecked(self, worker: Worker, ready: dict[str, Worker], now: float) -> bool:
        """Nothing is known yet, and soon will be: of itself, or of the way to it from another that is there."""
        sources = {worker_id for worker_id, source in ready.items() if source.health.usable}
        pairs = [pair for pair in worker.sources.all() if worker.health.usable and pair.source.worker_id in sources]
        return any(
            record.state is Health.NEW and now - record.since_s < self._book.config.canary_timeout_s
            for record in (worker.health, *(pair.health for pair in pairs))
        )

    def _is_free(self, info: WorkerInfo) -> bool:
        return not any(canary.involves(info.worker_id) for canary in self._live)

    def _start(self, source: WorkerInfo | None, target: WorkerInfo | None, now: float) -> None:
        self._num_sent += 1
        canary = new_canary(f"{self._book.config.canary_salt}-{self._num_sent}", source, target, now)
        self._live.append(canary)
        if source is None:
            self._send_decode(canary, None)
        else:
            canary.prefill_leg = self._open_leg(canary)
            self._book.actions.append(prefill_command(canary, self._book.config.canary_timeout_s))

    def _send_decode(self, canary: Canary, handoff: HandoffRef | None) -> None:
        canary.decode_leg, canary.begun = self._open_leg(canary), False
        self._book.actions.append(decode_command(canary, handoff, self._book.config.canary_timeout_s))

    def _open_leg(self, canary: Canary) -> int:
        leg = self._book.new_leg()
        self._legs[leg] = canary
        return leg

    # What workers say

    def prefill_event(self, worker: Worker, event: PrefillEvent, now: float) -> bool:
        """False: the event is not about a canary."""
        canary = self._legs.get(event.leg)
        if canary is None or canary.source is None or canary.source.worker_id != worker.info.worker_id:
            return False
        match event:
            case PrefillStarted():
                canary.begun = True
                if canary.target is not None:
                    self._send_decode(canary, HandoffRef(event.lease_id, event.source))
            case Tokens():
                canary.sealed = True
                if canary.target is None:
                    self._passed(canary, now)
            case LegFailed():
                self._failed(canary, worker, event.error, now)
        return True

    def decode_event(self, worker: Worker, event: DecodeEvent, now: float) -> bool:
        """False: the event is not about a canary."""
        canary = self._legs.get(event.leg)
        if canary is None or canary.target is None or canary.target.worker_id != worker.info.worker_id:
            return False
        match event:
            case DecodeAdmitted():
                canary.begun = True
            case DecodeRefused():
                self._end(canary)  # no room now; it is asked again
            case ImportReady():
                canary.imported = True
            case ImportFailed():
                self._import_failed(canary, event.error, now)
            case LegFailed():
                self._failed(canary, worker, event.error, now)
            case Tokens() if event.finish is not None:
                self._passed(canary, now, event.finish.timings)
        return True

    def worker_gone(self, worker_id: str) -> None:
        """Its canaries have said nothing: what has become of it counts by itself."""
        for canary in [canary for canary in self._live if canary.involves(worker_id)]:
            self._end(canary)

    # What it means

    def _passed(self, canary: Canary, now: float, timings: object = None) -> None:
        self._end(canary, cancel=False)
        for worker in (canary.source, canary.target):
            if worker is not None:
                self._book.workers.succeeded(worker.worker_id, now)
        if canary.source is not None and canary.target is not None and canary.imported:
            self._book.workers.transfer_succeeded(canary.source, canary.target.worker_id, now, timings)
        self.run(now)

    def _failed(self, canary: Canary, worker: Worker, error: BatonError, now: float) -> None:
        self._end(canary)
        if isinstance(error, Draining):
            self._book.workers.drain(worker, now)
        elif isinstance(error, FATAL) and not isinstance(error, DeadlineExceeded):
            # Even a canary is too long for it. It has answered, which is all that can be asked of it.
            self._book.workers.succeeded(worker.info.worker_id, now)
        else:
            self._book.workers.failed(worker.info.worker_id, f"deep check: {error.reason}: {error}", now)

    def _import_failed(self, canary: Canary, error: BatonError, now: float) -> None:
        self._end(canary)
        assert canary.target is not None
        if canary.source is None:
            return
        if isinstance(error, Draining):
            leaves(self._book, canary.source, now)
        elif is_the_pairs(error) and not is_leaving(self._book, canary.source):
            reason = f"{error.reason}: {error}"
            self._book.workers.transfer_failed(canary.source, canary.target.worker_id, reason, now)

    def _timed_out(self, canary: Canary, now: float) -> None:
        """Counts against who was to act next, unless that one shows that it only has much to do."""
        self._end(canary)
        seconds = self._book.config.canary_timeout_s
        source, target = canary.source, canary.target
        if source is not None and target is not None and canary.sealed and canary.begun and not canary.imported:
            self._book.workers.transfer_failed(source, target.worker_id, f"no transfer within {seconds:g} s", now)
            return
        culprit = source if source is not None and not canary.sealed else target
        assert culprit is not None
        worker = self._book.workers.get(culprit.worker_id)
        if worker.health.last_success_s >= canary.started_s:
            return
        if not canary.begun and worker.load is not None and worker.load.num_running:
            # Full of others' work, another router's perhaps. Were its step stuck, its clock would tell.
            self._book.workers.succeeded(culprit.worker_id, now)
        else:
            self._book.workers.failed(culprit.worker_id, f"deep check: no answer within {seconds:g} s", now)

    def _end(self, canary: Canary, *, cancel: bool = True) -> None:
        self._live.remove(canary)
        for leg, worker, kind in (
            (canary.prefill_leg, canary.source, CancelPrefill),
            (canary.decode_leg, canary.target, CancelDecode),
        ):
            if leg:
                assert worker is not None
                del self._legs[leg]
                if cancel and self._book.workers.current(worker.worker_id, worker.incarnation):
                    self._book.actions.append(kind(worker.worker_id, worker.incarnation, leg))


def _open(worker: Worker) -> bool:
    return worker.state is WorkerState.READY
