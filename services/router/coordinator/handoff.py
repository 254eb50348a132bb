"""What an event from a worker means for its request (docs/architecture.md, "What keeps the handoff right"). Pure.

Owns: the rules. Never: where the request goes next; one left without a leg is queued or parked by `Book.settle` and
placed by `dispatch.py`. Events of a leg that is not current change nothing; if the leg may live on at its worker, it is
cancelled there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.core.errors import Draining, ProtocolViolation
from services.router.coordinator.actions import CancelLeg, EmitTokens
from services.router.coordinator.book import Book
from services.router.coordinator.events import (
    DecodeAdmitted,
    DecodeRefused,
    FinishReason,
    ImportFailed,
    ImportReady,
    LeaseEnd,
    LeaseEnded,
    LegEvent,
    LegFailed,
    PrefillStarted,
    Tokens,
)
from services.router.coordinator.failures import (
    FATAL,
    blame,
    decode_failed,
    is_leaving,
    is_the_pairs,
    lapsed,
    leaves,
    note_failed_import,
    note_refusal,
    prefill_failed,
    source_gone,
)
from services.router.coordinator.requests import HeldLease, PlacedDecode, PlacedPrefill, Request
from services.router.coordinator.workers import Worker
from services.router.policy import Role

if TYPE_CHECKING:
    from baton.v1 import types_pb2


def leg_event(book: Book, worker: Worker, event: LegEvent, now: float) -> None:
    """Handles one event; its leg's number tells the request and the phase."""
    request = book.legs.get(event.leg)
    if request is not None and event.leg == request.released_leg:
        _released_leg_event(book, request, event)
        return
    current = () if request is None else (request.prefill, request.decode)
    leg = next((each for each in current if each is not None and each.leg == event.leg), None)
    if request is None or leg is None or leg.worker.worker_id != worker.info.worker_id:
        goes_on = isinstance(event, PrefillStarted | DecodeAdmitted | ImportReady)
        if goes_on or (isinstance(event, Tokens) and event.finish is None):
            book.actions.append(CancelLeg(worker.info.worker_id, worker.info.incarnation, event.leg))
        return
    leg.heard_s = book.awake.at(now)
    if isinstance(leg, PlacedPrefill):
        _prefill_event(book, request, leg, event, now)
    else:
        _decode_event(book, request, leg, worker, event, now)


def _prefill_event(book: Book, request: Request, leg: PlacedPrefill, event: LegEvent, now: float) -> None:
    match event:
        case PrefillStarted():
            _prefill_started(book, request, leg, event, now)
        case Tokens():
            _prefill_tokens(book, request, leg, event, now)
        case LegFailed():
            prefill_failed(book, request, leg, event.error, now, cancel=False)
        case LeaseEnded():
            _lease_ended(book, request, leg, event, now)
        case _:
            prefill_failed(book, request, leg, ProtocolViolation("an event of a decode leg"), now, cancel=True)


def _decode_event(book: Book, request: Request, leg: PlacedDecode, worker: Worker, event: LegEvent, now: float) -> None:
    match event:
        case DecodeAdmitted():
            _decode_admitted(book, request, leg, event, now)
        case DecodeRefused():
            _decode_refused(book, request, leg, worker, now)
        case ImportReady():
            _import_ready(book, request, leg, now)
        case ImportFailed():
            _import_failed(book, request, leg, worker, event, now)
        case Tokens():
            _decode_tokens(book, request, leg, event, now)
        case LegFailed():
            decode_failed(book, request, leg, event.error, now, cancel=False)
        case _:
            decode_failed(book, request, leg, ProtocolViolation("an event of a prefill leg"), now, cancel=True)


# Prefill legs


def _released_leg_event(book: Book, request: Request, event: LegEvent) -> None:
    """The decode leg has repeated its token, and its lease is over: only its timings are news."""
    if isinstance(event, Tokens):
        _note_timings(request, event.timings)
    elif isinstance(event, LeaseEnded):
        book.forget_released(request)


def _prefill_started(book: Book, request: Request, leg: PlacedPrefill, event: PrefillStarted, now: float) -> None:
    if leg.lease is not None:
        prefill_failed(book, request, leg, ProtocolViolation("a second lease"), now, cancel=True)
        return
    leg.lease = HeldLease(event.lease_id, event.source, opened_s=now)
    book.workers.answered(leg.worker.worker_id, leg.leg)
    request.refusals.clear()
    if not request.announced:
        request.cached_tokens = min(event.cached_tokens, len(request.spec.token_ids))
    book.announce(request)
    book.settle(request, now)


def _prefill_tokens(book: Book, request: Request, leg: PlacedPrefill, event: Tokens, now: float) -> None:
    if leg.lease is None or leg.sealed_s is not None or not _fits(request, event, book.config.vocab_size):
        prefill_failed(book, request, leg, ProtocolViolation("token out of place"), now, cancel=True)
        return
    if _receive(book, request, event, now):
        _made_progress(request, Role.PREFILL)
    book.workers.succeeded(leg.worker.worker_id, now)
    _note_timings(request, event.timings)
    book.seal_prefill(request, now)
    if event.finish is not None:
        # The source closes the lease at seal.
        book.end_prefill(request, now, "done", cancel=False)
    _finish_if_over(book, request, event, now)


def _lease_ended(book: Book, request: Request, leg: PlacedPrefill, event: LeaseEnded, now: float) -> None:
    if event.reason is not LeaseEnd.RELEASED:
        if request.decode is None:
            # Nobody had it, and it was held.
            blame(book, request, leg, Role.PREFILL, ProtocolViolation(f"lease {event.reason.value}"), now)
        else:
            request.decode.lapsed_source = leg.worker
    # Released without a decode leg: to one that was lost since, and counted then. With one, perhaps that one released
    # it, and its own report is on the way.
    source_gone(book, request, now, f"lease {event.reason.value}", cancel=False)
    book.settle(request, now)


# Decode legs


def _decode_admitted(book: Book, request: Request, leg: PlacedDecode, event: DecodeAdmitted, now: float) -> None:
    leg.admitted_s = now
    book.workers.answered(leg.worker.worker_id, leg.leg)
    if not request.announced:
        request.cached_tokens = min(event.cached_tokens, len(request.spec.token_ids))
    book.announce(request)
    book.settle(request, now)
    request.refusals.clear()


def _decode_refused(book: Book, request: Request, leg: PlacedDecode, worker: Worker, now: float) -> None:
    note_refusal(book, request, leg, worker, now)
    book.end_decode(request, now, "refused", cancel=False)
    book.settle(request, now, refused=True)


def _import_ready(book: Book, request: Request, leg: PlacedDecode, now: float) -> None:
    leg.orphaned_s = None
    if request.prefill is not None:
        book.workers.transfer_succeeded(request.prefill.worker, leg.worker.worker_id, now)
        book.release_prefill(request, now)


def _import_failed(
    book: Book, request: Request, leg: PlacedDecode, worker: Worker, event: ImportFailed, now: float
) -> None:
    source = request.prefill
    lapsed(book, request, leg, now)
    if source is not None and isinstance(event.error, Draining):
        leaves(book, source.worker, now)
    leaving = source is not None and is_leaving(book, source.worker)
    if source is not None and not leaving and is_the_pairs(event.error):
        reason = f"{event.error.reason}: {event.error}"
        book.workers.transfer_failed(source.worker, worker.info.worker_id, reason, now)
    book.end_decode(request, now, "import failed", cancel=False)
    if isinstance(event.error, FATAL):
        book.fail(request, event.error, now)
        return
    if source is not None and source.lease is not None:
        source.lease.num_failed_imports += 1
        if event.lease_alive and source.lease.num_failed_imports < book.config.max_failed_imports:
            note_refusal(book, request, leg, worker, now)
        else:
            if not leaving:
                note_failed_import(book, request, leg, source.worker, now)
            book.end_prefill(request, now, "import failed")
    book.settle(request, now)


def _decode_tokens(book: Book, request: Request, leg: PlacedDecode, event: Tokens, now: float) -> None:
    if not _fits(request, event, book.config.vocab_size):
        decode_failed(book, request, leg, ProtocolViolation("token out of place"), now, cancel=True)
        return
    book.announce(request)
    fresh = _receive(book, request, event, now)
    book.workers.succeeded(leg.worker.worker_id, now)
    if fresh and len(request.output) > leg.output_base + 1:
        # Its first token is the prefill's work: a prompt that kills decode workers must not look like progress.
        _made_progress(request, Role.DECODE)
    if event.finish is not None:
        book.end_decode(request, now, "done", cancel=False)
    _finish_if_over(book, request, event, now)


# Output: merged by position, so that nothing is lost and nothing repeated


def _fits(request: Request, event: Tokens, vocab_size: int) -> bool:
    """Returns whether the tokens can be this request's: they are the model's, leave no gap, repeat only what was
    received, and nothing follows a finish."""
    end = event.position + len(event.token_ids)
    received = request.output[event.position : end]
    return (
        0 <= event.position <= len(request.output)
        and list(event.token_ids[: len(received)]) == received
        and end <= request.max_tokens
        and all(0 <= token_id < vocab_size for token_id in event.token_ids)
        and (event.finish is None or end >= len(request.output))
        and len(event.logprobs) in (0, len(event.token_ids))
    )


def _receive(book: Book, request: Request, event: Tokens, now: float) -> bool:
    """Adds the new tokens to the output and sends them to the client. Returns False if there were none."""
    have = len(request.output)
    fresh = event.token_ids[have - event.position :]
    if not fresh:
        return False
    request.output.extend(fresh)
    if request.first_token_s is None:
        request.first_token_s = now
    book.actions.append(EmitTokens(request.request_id, have, fresh, event.logprobs[have - event.position :]))
    return True


def _finish_if_over(book: Book, request: Request, event: Tokens, now: float) -> None:
    if event.finish is not None:
        _note_timings(request, event.finish.timings)
        book.finish(request, event.finish.reason, event.finish.stop_token_id, now)
    elif len(request.output) >= request.max_tokens:
        book.finish(request, FinishReason.LENGTH, None, now)


def _made_progress(request: Request, role: Role) -> None:
    """Forgets the crashes in this role."""
    request.crashes = [crash for crash in request.crashes if crash.role is not role]


def _note_timings(request: Request, timings: types_pb2.PhaseTimings | None) -> None:
    if timings is not None:
        request.worker_timings.append(timings)
