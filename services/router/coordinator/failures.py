"""Legs that end without finishing their request: failed, lost, migrated, overdue. Pure.

Owns: whom a failure counts against, and what survives it. Giving up a decode leg leaves the prefill leg and its lease;
without both the request is computed again from its prompt and the output received.
"""

from __future__ import annotations

from services.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    LeaseInvalid,
    MalformedMessage,
    Overloaded,
    StaleIncarnation,
    UnknownModel,
)
from services.router.coordinator.book import Book
from services.router.coordinator.events import WorkerInfo
from services.router.coordinator.requests import BackOff, Crash, PlacedDecode, PlacedLeg, PlacedPrefill, Request
from services.router.coordinator.workers import Worker
from services.router.policy import Role

# No other worker would do better.
FATAL = (InvalidRequest, MalformedMessage, UnknownModel, Overloaded, DeadlineExceeded)


def prefill_failed(
    book: Book, request: Request, leg: PlacedPrefill, error: BatonError, now: float, *, cancel: bool
) -> None:
    if isinstance(error, FATAL):
        book.end_prefill(request, now, "failed", cancel=cancel)
        book.fail(request, error, now)
        return
    counted = blame(book, request, leg, Role.PREFILL, error, now)
    if request.decode is not None and leg.sealed_s is None:
        # Never sealed, so there is nothing the decode leg could still complete.
        book.end_decode(request, now, "source failed")
    source_gone(book, request, now, "failed", cancel=cancel)
    book.settle(request, now, refused=not counted)


def decode_failed(
    book: Book, request: Request, leg: PlacedDecode, error: BatonError, now: float, *, cancel: bool
) -> None:
    book.end_decode(request, now, "failed", cancel=cancel)
    if isinstance(error, FATAL):
        book.fail(request, error, now)
        return
    counted = blame(book, request, leg, Role.DECODE, error, now)
    book.settle(request, now, refused=not counted)


def source_gone(book: Book, request: Request, now: float, outcome: str, *, cancel: bool) -> None:
    """The prefill leg is over. A decode leg that may have fetched everything is left to say so itself, for a while."""
    book.end_prefill(request, now, outcome, cancel=cancel)
    if request.decode is not None:
        request.decode.orphaned_s = book.awake.at(now)
        book.silent_legs.set(request.decode.orphaned_s + book.config.orphan_timeout_s, request.decode.leg)


def blame(book: Book, request: Request, leg: PlacedLeg, role: Role, error: BatonError, now: float) -> bool:
    """Whether it counts. A worker that was told to leave while a command was on its way to it has only refused."""
    worker = leg.worker
    if isinstance(error, Draining):
        leaves(book, worker, now)
        return False
    _count(book, request, leg.leg, Crash(worker.worker_id, worker.incarnation, role, session_lost=False), now)
    book.workers.failed(worker.worker_id, f"{error.reason}: {error}", now)
    return True


def leaves(book: Book, worker: WorkerInfo, now: float) -> None:
    """Someone has heard that it is to leave, perhaps before it has said so here."""
    current = book.workers.current(worker.worker_id, worker.incarnation)
    if current is not None:
        book.workers.drain(current, now)


def is_leaving(book: Book, worker: WorkerInfo) -> bool:
    """What fails there now fails because it goes."""
    if worker.worker_id not in book.workers:
        return False
    known = book.workers.get(worker.worker_id)
    return known.info.incarnation == worker.incarnation and known.draining


def note_failed_import(book: Book, request: Request, leg: PlacedDecode, source: WorkerInfo, now: float) -> None:
    """The decode role made no progress, whoever is to blame; the source is avoided."""
    crash = Crash(source.worker_id, source.incarnation, Role.DECODE, session_lost=False, failed_import=True)
    _count(book, request, leg.leg, crash, now)


def _count(book: Book, request: Request, leg: int, crash: Crash, now: float) -> None:
    """Against the request, unless the leg was placed before the last crash that was: one fault has taken both, a rack
    of workers perhaps. For the same reason the last chance is not risked before all that fell has been noticed."""
    if leg <= request.newest_leg_at_crash:
        return
    request.newest_leg_at_crash = book.newest_leg
    request.crashes.append(crash)
    taken_away = crash.session_lost or crash.failed_import
    if taken_away and len(request.crashes) == book.config.max_crashes - 1:
        request.not_before_s = now + book.config.last_chance_pause_s


def lapsed(book: Book, request: Request, leg: PlacedDecode, now: float) -> None:
    """The leg is over without its KV. Did its source give up the lease meanwhile, then it could not be fetched in time:
    the source's clocks may be faster than the target's own, so that the target never comes to say so."""
    source = leg.lapsed_source
    if source is not None and not is_leaving(book, source):
        reason = "the lease ended before its blocks were taken over"
        book.workers.transfer_failed(source, leg.worker.worker_id, reason, now)
        note_failed_import(book, request, leg, source, now)


def is_the_pairs(error: BatonError) -> bool:
    """Whether a failed import says something of the way between the two workers, or only of this lease."""
    return not isinstance(error, (LeaseInvalid, StaleIncarnation, Draining, Cancelled, *FATAL))


def note_refusal(book: Book, request: Request, leg: PlacedDecode, worker: Worker, now: float) -> None:
    before = request.refusals.get(worker.info.worker_id)
    count = before.count + 1 if before else 1
    config = book.config
    delay_s = min(config.max_refusal_backoff_s, config.refusal_backoff_s * 2.0 ** min(count - 1, 16))
    jitter = 0.75 + 0.25 * (leg.leg * 0.618034 % 1.0)  # spreads retries, repeatably
    load_number = worker.load.sequence_number if worker.load else 0
    request.refusals[worker.info.worker_id] = BackOff(load_number, now + delay_s * jitter, count)


def worker_gone(
    book: Book, worker: Worker, legs: dict[int, str], now: float, *, crashed: bool, stuck: bool = False
) -> None:
    """Its session is over, and all it held for this router with it. `legs`: those current at the loss.

    `stuck`: the session lives, so the legs are cancelled too; a step that does not end may never see that.
    """
    newest_legs = {request_id: leg for leg, request_id in sorted(legs.items())}
    for request_id, newest in newest_legs.items():
        with book.isolated("event", request := book.requests.get(request_id), now):
            assert request is not None, f"worker {worker.info.worker_id} has legs of no request"
            _worker_gone_under(book, worker, legs, request, newest, now, crashed=crashed, stuck=stuck)
    if not stuck:
        # None is left, but for a defect that has been told; and it must not keep the worker from joining again.
        for leg in list(worker.legs):
            book.workers.drop_leg(worker.info.worker_id, leg)


def _worker_gone_under(
    book: Book,
    worker: Worker,
    legs: dict[int, str],
    request: Request,
    newest: int,
    now: float,
    *,
    crashed: bool,
    stuck: bool,
) -> None:
    outcome, role = "stuck" if stuck else "lost", Role.PREFILL
    if request.decode is not None and request.decode.leg in legs:
        role = Role.DECODE
        book.end_decode(request, now, outcome, cancel=stuck)
    if request.prefill is not None and request.prefill.leg in legs:
        if request.prefill.sealed_s is None:
            role = Role.PREFILL
        source_gone(book, request, now, outcome, cancel=stuck)
    if crashed:
        crash = Crash(worker.info.worker_id, worker.info.incarnation, role, session_lost=not stuck)
        request.crashes = [each for each in request.crashes if not each.foretold(crash)]
        _count(book, request, newest, crash, now)
    book.settle(request, now)


def worker_alive(book: Book, worker: Worker) -> None:
    """The incarnation whose session broke is back: that was no crash."""
    back = (worker.info.worker_id, worker.info.incarnation)
    for request in book.requests.values():
        request.crashes = [crash for crash in request.crashes if not crash.session_lost or crash.process != back]


def migrate(book: Book, worker: Worker, now: float) -> int:
    """Gives up all legs at `worker`; their requests go on elsewhere. Returns how many requests that were."""
    requests = {request_id: book.requests[request_id] for request_id in worker.legs.values()}
    legs = set(worker.legs)
    for request in requests.values():
        with book.isolated("event", request, now):
            if request.decode is not None and request.decode.leg in legs:
                book.end_decode(request, now, "migrated")
            if request.prefill is not None and request.prefill.leg in legs:
                source_gone(book, request, now, "migrated", cancel=True)
            book.settle(request, now)
    return len(requests)
