"""Says what the events of a store's leg mean until the store has the handoff. Pure.

From then on the store's leg is the request's prefill leg, and `handoff.py` has the rules. Never: when a handoff goes to
a store (`placement.py`), or to which one (`services.router.policy`).

A store is a help and no condition. So whatever goes wrong with it, the handoff stays where it is, the request waits as
if there were no store, and nothing is counted against it; if the source is gone too, the prompt is computed again.
"""

from __future__ import annotations

from services.core.errors import BatonError, Draining, ProtocolViolation
from services.router.coordinator.book import Book
from services.router.coordinator.events import (
    DecodeAdmitted,
    DecodeRefused,
    ImportFailed,
    LegEvent,
    LegFailed,
    Parked,
)
from services.router.coordinator.handoff import is_leaving, is_the_pairs, leaves, note_refusal, takes_no_more
from services.router.coordinator.request import PlacedPark, Request
from services.router.coordinator.workers import Worker
from services.router.policy import Role


def leg_event(book: Book, worker: Worker, event: LegEvent, request: Request, leg: PlacedPark, now: float) -> None:
    """Handles one event of a store's leg that does not have its handoff yet."""
    match event:
        case DecodeAdmitted() if leg.admitted_s is None:
            leg.admitted_s, leg.heard_s = now, book.awake.at(now)
            book.workers.answered(worker.info.worker_id, leg.leg)
        case DecodeRefused() if leg.admitted_s is None:
            _give_up(book, request, leg, worker, now, "refused", cancel=False)
        case Parked():
            book.workers.succeeded(worker.info.worker_id, now)
            book.workers.transfer_succeeded(leg.handoff.worker, worker.info.worker_id, now)
            book.take_parked(request, event, now)
        case ImportFailed():
            _import_failed(book, request, leg, worker, event.error, now)
        case LegFailed():
            park_failed(book, request, leg, event.error, now, cancel=False)
        case _:
            park_failed(book, request, leg, ProtocolViolation("an event of another kind of leg"), now, cancel=True)


def park_failed(book: Book, request: Request, leg: PlacedPark, error: BatonError, now: float, *, cancel: bool) -> None:
    """Gives a store's leg up because the store failed, or takes nothing new."""
    if not takes_no_more(book, leg.worker, Role.STORE, error, now):
        book.workers.failed(leg.worker.worker_id, f"{error.reason}: {error}", now)
    _give_up(book, request, leg, book.workers.get(leg.worker.worker_id), now, "failed", cancel=cancel)


def park_orphaned(book: Book, request: Request, leg: PlacedPark, now: float) -> None:
    """Gives up a leg whose source is gone, and which has not said in time whether it had everything. That is no failure
    of the store: it may still be finding out that its source is gone."""
    _give_up(book, request, leg, book.workers.get(leg.worker.worker_id), now, "orphaned", cancel=True)


def _import_failed(
    book: Book, request: Request, leg: PlacedPark, worker: Worker, error: BatonError, now: float
) -> None:
    """Leaves the handoff at its source. Whether its lease still lives, the source says, or who tries to fetch it."""
    source = leg.handoff.worker
    if isinstance(error, Draining):
        leaves(book, source, now)
    elif is_the_pairs(error) and not is_leaving(book, source):
        book.workers.transfer_failed(source, worker.info.worker_id, f"{error.reason}: {error}", now)
    _give_up(book, request, leg, worker, now, "import failed", cancel=False)


def _give_up(
    book: Book, request: Request, leg: PlacedPark, worker: Worker, now: float, outcome: str, *, cancel: bool
) -> None:
    note_refusal(book, request, leg, worker, now)
    book.end_park(request, now, outcome, cancel=cancel)
    book.settle(request, now, refused=True)
