"""Decides what an event from a worker, or a worker's loss, means for a request. Pure.

Owns: the rules, whom a failure counts against, and what survives it (docs/architecture.md, "What keeps the handoff
right"). The end of a decode leg leaves the prefill leg and its lease; without either, the request is computed again
from its prompt and the output received. Never: where the request goes next: `Book.settle` queues or parks it, and
`placement.py` places it. Events of a leg that is not current change nothing; if the leg may still live at its worker,
it is cancelled there.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import TYPE_CHECKING

from services.core.errors import (
    BatonError,
    Cancelled,
    ConstraintUnsatisfied,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    LeaseInvalid,
    MalformedMessage,
    Overloaded,
    ProtocolViolation,
    RoleGone,
    SequencePreempted,
    StaleIncarnation,
    UnknownModel,
    UnsupportedModel,
)
from services.router.coordinator.book import Book
from services.router.coordinator.events import (
    DecodeAdmitted,
    DecodeRefused,
    EmitPromptTokens,
    EmitTokens,
    FinishReason,
    ImportFailed,
    ImportReady,
    LeaseEnd,
    LeaseEnded,
    LegEvent,
    LegFailed,
    Parked,
    PrefillStarted,
    PrefixBrought,
    PromptComputed,
    PromptTokens,
    Tokens,
    WorkerInfo,
)
from services.router.coordinator.request import (
    BackOff,
    Crash,
    HeldLease,
    PartialAnswer,
    PlacedDecode,
    PlacedLeg,
    PlacedPark,
    PlacedPrefill,
    Request,
)
from services.router.coordinator.workers import Worker
from services.router.policy import Role

if TYPE_CHECKING:
    from baton.v1 import types_pb2


def leg_event(book: Book, worker: Worker, event: LegEvent, found: tuple[Request, PlacedLeg] | None, now: float) -> None:
    """Handles one event of a worker. `found` is what `Book.leg_at` says of the event's leg, unless that is a store's
    (`parking.py`)."""
    if found is None:
        goes_on = isinstance(
            event, PrefillStarted | PromptComputed | DecodeAdmitted | ImportReady | Parked | PromptTokens
        )
        if goes_on or (isinstance(event, Tokens) and event.finish is None):
            book.cancel_leg(worker.info, event.leg)
        return
    if isinstance(event, PrefixBrought):
        book.prefixes.brought(worker, event)
        return
    request, leg = found
    assert not isinstance(leg, PlacedPark), "parking.py has these"
    if leg is request.released:
        _released_leg_event(book, request, event, now)
    elif isinstance(leg, PlacedPrefill):
        _prefill_event(book, request, leg, event, now)
    else:
        _decode_event(book, request, leg, worker, event, now)


def _went_on(book: Book, leg: PlacedPrefill | PlacedDecode, now: float) -> None:
    """Notes that the leg has brought its request further. A repetition does not, and must not keep the leg alive."""
    leg.heard_s = book.awake.at(now)


def _prefill_event(book: Book, request: Request, leg: PlacedPrefill, event: LegEvent, now: float) -> None:
    match event:
        case PromptComputed():
            leg.num_computed = event.num_tokens
        case PrefillStarted():
            _prefill_started(book, request, leg, event, now)
        case PromptTokens():
            if leg.lease is None or not _take_scores(book, request, leg, event, now):
                prefill_failed(
                    book, request, leg, ProtocolViolation("log-probabilities out of place"), now, cancel=True
                )
            else:
                book.settle(request, now)
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
        case Tokens():  # first, since most events are of this kind
            _decode_tokens(book, request, leg, event, now)
        case DecodeAdmitted():
            _decode_admitted(book, request, leg, event, now)
        case DecodeRefused():
            _decode_refused(book, request, leg, worker, now)
        case ImportReady():
            _import_ready(book, request, leg, event, now)
        case ImportFailed():
            _import_failed(book, request, leg, worker, event, now)
        case PromptTokens():
            if leg.has_handoff or leg.admitted_s is None or not _take_scores(book, request, leg, event, now):
                decode_failed(book, request, leg, ProtocolViolation("log-probabilities out of place"), now, cancel=True)
        case LegFailed():
            decode_failed(book, request, leg, event.error, now, cancel=False)
        case _:
            decode_failed(book, request, leg, ProtocolViolation("an event of a prefill leg"), now, cancel=True)


# Prefill legs


def _began(book: Book, request: Request, leg: PlacedPrefill | PlacedDecode, cached_tokens: int, now: float) -> None:
    """Notes that a worker has reserved the leg's blocks. The first time, the client is told."""
    book.workers.answered(leg.worker.worker_id, leg.leg)
    book.prefixes.over(leg.leg)
    if not request.story.announced:
        request.story.cached_tokens = min(cached_tokens, len(request.spec.token_ids))
        request.share.charge_prompt(-request.story.cached_tokens)
    book.announce(request)
    book.settle(request, now)
    request.setbacks.refusals.clear()  # after `settle`, which reports them with the placement that has ended
    if cached_tokens:
        leg.origins.add(leg.worker.fingerprint.kv)
        if request.spec.epoch != book.verdicts.epoch:  # they may come from a worker that was found wrong since
            book.begin_again(request, now)


def _released_leg_event(book: Book, request: Request, event: LegEvent, now: float) -> None:
    """Handles an event of a prefill leg whose blocks were taken over: only its timings are still of use."""
    leg = request.released
    if isinstance(event, Tokens) and leg is not None and leg.sealed_s is None:
        leg.sealed_s = now
        _went_on(book, leg, now)
        _note_timings(request, event.timings)
    elif isinstance(event, LeaseEnded):
        book.forget_released(request)


def _prefill_started(book: Book, request: Request, leg: PlacedPrefill, event: PrefillStarted, now: float) -> None:
    if leg.lease is not None:
        prefill_failed(book, request, leg, ProtocolViolation("a second lease"), now, cancel=True)
        return
    leg.lease = HeldLease(event.lease_id, event.source, opened_s=now)
    _went_on(book, leg, now)
    _began(book, request, leg, event.cached_tokens, now)


def _prefill_tokens(book: Book, request: Request, leg: PlacedPrefill, event: Tokens, now: float) -> None:
    answer = _answer_of(request, event)
    is_token_0 = len(event.token_ids) == 1 and event.position == leg.output_base
    out_of_place = answer is None or leg.lease is None or event.index in leg.sampled or not is_token_0
    if answer is None or out_of_place or not _fits(request, answer, event, book.config.vocab_size):
        prefill_failed(book, request, leg, ProtocolViolation("token out of place"), now, cancel=True)
        return
    if _receive(book, request, leg, answer, event, now):
        _made_progress(request, Role.PREFILL)
    book.workers.succeeded(leg.worker.worker_id, now)
    _note_timings(request, event.timings)
    leg.sampled.add(event.index)
    _went_on(book, leg, now)
    leg.num_ended += event.finish is not None
    if len(leg.sampled) == len(request.answers):
        book.seal_prefill(request, now)
        if leg.num_ended == len(request.answers):
            # The source closes the lease at seal.
            book.end_prefill(request, now, "done", cancel=False)
    _finish_if_over(book, request, answer, event, now)


def _lease_ended(book: Book, request: Request, leg: PlacedPrefill, event: LeaseEnded, now: float) -> None:
    nobody_had_it = leg.lease is None or not leg.lease.was_offered or leg.sealed_s is None
    if event.reason is LeaseEnd.RELEASED and nobody_had_it:
        # Uncounted, the worker could end its leases again and again, and the request would be computed for ever.
        prefill_failed(book, request, leg, ProtocolViolation("a lease is released that nobody had"), now, cancel=True)
        return
    if event.reason is not LeaseEnd.RELEASED:
        decode = request.decode
        if leg.lease is not None and leg.lease.num_failed_imports:
            # The destination that failed to fetch it was blamed then, and used up the lease's time. Now the failure
            # only counts against the request.
            if not is_leaving(book, leg.worker):
                note_failed_import(book, request, leg.leg, leg.worker, now)
        elif decode is not None and decode.admitted_s is not None and leg.sealed_s is not None:
            decode.lapsed_source = leg.worker
        else:
            # No decode worker had admitted it, and it was held, or not even sealed: the source is to blame.
            blame(book, request, leg, Role.PREFILL, ProtocolViolation(f"lease {event.reason.value}"), now)
    elif request.decode is not None:
        _handed_over(book, leg, request.decode, now)  # the source is the first to say so
        request.decode.released_by = leg.worker
    # A lease released without a current decode leg went to a leg that was lost since, and was counted then. With a
    # current decode leg, that one may have released it, and its own report is on the way.
    source_gone(book, request, now, f"lease {event.reason.value}", cancel=False)
    book.settle(request, now)


# Decode legs


def _decode_admitted(book: Book, request: Request, leg: PlacedDecode, event: DecodeAdmitted, now: float) -> None:
    if leg.admitted_s is None:  # else it was preempted, and has blocks again
        leg.admitted_s = now
        _went_on(book, leg, now)
    _began(book, request, leg, event.cached_tokens, now)


def _decode_refused(book: Book, request: Request, leg: PlacedDecode, worker: Worker, now: float) -> None:
    was_ready = leg.has_handoff and request.prefill is None and leg.orphaned_s is None
    if leg.admitted_s is not None or was_ready:
        decode_failed(book, request, leg, ProtocolViolation("refused what it had admitted"), now, cancel=True)
        return
    note_refusal(book, request, leg, worker, now)
    if not leg.has_handoff:
        request.setbacks.num_fruitless_starts -= 1  # it has not begun
    book.end_decode(request, now, "refused", cancel=False)
    book.settle(request, now, refused=True)


def _import_ready(book: Book, request: Request, leg: PlacedDecode, event: ImportReady, now: float) -> None:
    leg.orphaned_s = None
    source = request.prefill.worker if request.prefill is not None else leg.released_by
    if source is not None:
        book.workers.copied(source, leg.worker.worker_id, event.num_bytes, event.copy_ms, now)
    if request.prefill is not None:
        _handed_over(book, request.prefill, leg, now)
        book.workers.transfer_succeeded(request.prefill.worker, leg.worker.worker_id, now)
        book.release_prefill(request, now)
        _went_on(book, leg, now)


def _handed_over(book: Book, source: PlacedPrefill, leg: PlacedDecode, now: float) -> None:
    """Notes how long the handoff took after both its prompt was computed and its decode worker had admitted it."""
    if source.sealed_s is not None and leg.admitted_s is not None:
        took_s = now - max(source.sealed_s, leg.admitted_s)
        book.workers.handed_over(source.worker, leg.worker.worker_id, took_s, now)


def _import_failed(
    book: Book, request: Request, leg: PlacedDecode, worker: Worker, event: ImportFailed, now: float
) -> None:
    source = request.prefill
    if not leg.has_handoff or (source is None and leg.orphaned_s is None):
        decode_failed(book, request, leg, ProtocolViolation("an import fails that is not under way"), now, cancel=True)
        return
    if source is not None and isinstance(event.error, Draining):
        leaves(book, source.worker, now)
    if not isinstance(event.error, (Draining, Cancelled, *FATAL)):
        lapsed(book, request, leg, now)
    leaving = source is not None and is_leaving(book, source.worker)
    if source is not None and not leaving and is_the_pairs(event.error):
        reason = f"{event.error.reason}: {event.error}"
        book.workers.transfer_failed(source.worker, worker.info.worker_id, reason, now)
    book.end_decode(request, now, "import failed", cancel=False)
    if isinstance(event.error, FATAL):
        _give_up_decode(book, request, leg, event.error, now)
        return
    if source is not None and source.lease is not None:
        source.lease.num_failed_imports += 1
        if event.lease_alive and source.lease.num_failed_imports < book.config.max_failed_imports:
            note_refusal(book, request, leg, worker, now)
        else:
            if not leaving:
                note_failed_import(book, request, leg.leg, source.worker, now)
            book.end_prefill(request, now, "import failed")
    book.settle(request, now)


def _decode_tokens(book: Book, request: Request, leg: PlacedDecode, event: Tokens, now: float) -> None:
    answer = _answer_of(request, event)
    if answer is not None and answer.over:
        return  # the worker had said so before it knew
    if answer is None or not _fits(request, answer, event, book.config.vocab_size):
        decode_failed(book, request, leg, ProtocolViolation("token out of place"), now, cancel=True)
        return
    book.announce(request)
    fresh = _receive(book, request, leg, answer, event, now)
    book.workers.succeeded(leg.worker.worker_id, now)
    if fresh and len(answer.output) > leg.output_base + 1:
        # Its first token is the prefill's work: a prompt that kills decode workers must not count as progress.
        _made_progress(request, Role.DECODE)
    if event.finish is not None and request.open_answers == [answer]:
        book.end_decode(request, now, "done", cancel=False)
    _finish_if_over(book, request, answer, event, now)


def stop_answer(book: Book, request: Request, place: int, now: float) -> None:
    """Finishes an answer whose text holds a stop string."""
    _end_answer(book, request, place, FinishReason.STOP, now)


def _end_answer(book: Book, request: Request, place: int, reason: FinishReason, now: float) -> None:
    """Finishes an answer that its worker goes on with. If its leg makes others, the worker is told of this one."""
    request.answers[place].given_up = True
    book.finish(request, request.answers[place], reason, None, now)
    if request.decode is not None:  # others go on; otherwise the leg has ended with the request
        book.cancel_leg(request.decode.worker, request.decode.leg, place)


def _answer_of(request: Request, event: Tokens) -> PartialAnswer | None:
    """Returns the answer that the tokens are of; None if the request has no such answer."""
    return request.answers[event.index] if 0 <= event.index < len(request.answers) else None


# Output is merged by position, so that nothing is lost and nothing is repeated


def _fits(request: Request, answer: PartialAnswer, event: Tokens, vocab_size: int) -> bool:
    """Returns whether the tokens can be this answer's.

    They must be tokens of the model, leave no gap, repeat only what was received, stay within
    `max_tokens`, and not finish before what was received ends; log-probabilities must be one per token, or none. The
    prompt's log-probabilities come before.
    """
    token_ids, have = event.token_ids, len(answer.output)
    end = event.position + len(token_ids)
    received = answer.output[event.position : end] if event.position < have else ()
    return (
        not request.awaits_scores
        and 0 <= event.position <= have
        and (not received or token_ids[: len(received)] == tuple(received))
        and end <= request.max_tokens
        and (not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size))
        and (event.finish is None or end >= have)
        and len(event.logprobs) in (0, len(token_ids))
    )


def _take_scores(
    book: Book, request: Request, leg: PlacedPrefill | PlacedDecode, event: PromptTokens, now: float
) -> bool:
    """Sends those of the prompt's log-probabilities to the client that it does not have yet: a replay repeats some.
    Returns False if they cannot be this request's."""
    have, end = request.num_scored, event.position + len(event.logprobs)
    if not request.spec.scores_prompt or not 1 <= event.position <= have or end > len(request.spec.token_ids):
        return False
    fresh = event.logprobs[have - event.position :]
    if fresh:
        book.announce(request)
        request.num_scored = end
        _went_on(book, leg, now)
        request.output_from |= leg.origins
        book.actions.append(EmitPromptTokens(request.request_id, have, fresh))
    return True


def _receive(
    book: Book,
    request: Request,
    leg: PlacedPrefill | PlacedDecode,
    answer: PartialAnswer,
    event: Tokens,
    now: float,
) -> bool:
    """Adds the new tokens to the answer and sends them to the client. Returns False if there were none."""
    have = len(answer.output)
    fresh = event.token_ids[have - event.position :]
    if not fresh:
        return False
    answer.output.extend(fresh)
    _went_on(book, leg, now)
    request.output_from |= leg.origins
    book.received(request, len(fresh))
    request.setbacks.num_fruitless_starts = 0
    if request.story.first_token_s is None:
        request.story.first_token_s = now
    logprobs = event.logprobs[have - event.position :]
    is_stopped = event.finish is not None and event.finish.stop_token_id is not None
    book.actions.append(EmitTokens(request.request_id, have, fresh, logprobs, answer.index, is_stopped))
    return True


def _finish_if_over(book: Book, request: Request, answer: PartialAnswer, event: Tokens, now: float) -> None:
    if event.finish is not None:
        _note_timings(request, event.finish.timings)
        book.finish(request, answer, event.finish.reason, event.finish.stop_token_id, now)
    elif len(answer.output) >= request.max_tokens:
        _end_answer(book, request, event.index, FinishReason.LENGTH, now)


def _made_progress(request: Request, role: Role) -> None:
    """Forgets the request's crashes in this role."""
    if request.setbacks.crashes:
        request.setbacks.crashes = [crash for crash in request.setbacks.crashes if crash.role is not role]


def _note_timings(request: Request, timings: types_pb2.PhaseTimings | None) -> None:
    if timings is not None:
        request.story.worker_timings.append(timings)


# Legs that end without finishing their request: failed, lost, migrated

# The request itself is at fault, or asks what the model is not made for: no other worker would do better, except that
# engines differ in what they serve (`_goes_to_another_engine`).
FATAL = (
    *(InvalidRequest, ConstraintUnsatisfied, MalformedMessage),
    *(UnknownModel, UnsupportedModel, Overloaded, DeadlineExceeded),
)


def prefill_failed(
    book: Book, request: Request, leg: PlacedPrefill, error: BatonError, now: float, *, cancel: bool
) -> None:
    if _goes_to_another_engine(book, request, leg, error):
        counted = False
    elif isinstance(error, FATAL) and leg.worker.roles is not Role.STORE:  # without a store's help it goes on
        book.end_prefill(request, now, "failed", cancel=cancel)
        book.fail(request, error, now)
        return
    else:
        counted = blame(book, request, leg, Role.PREFILL, error, now)
    if request.decode is not None and leg.sealed_s is None:
        # The lease was never sealed, so the decode leg cannot complete its import.
        book.end_decode(request, now, "source failed")
    source_gone(book, request, now, "failed", cancel=cancel)
    book.settle(request, now, refused=not counted)


def decode_failed(
    book: Book, request: Request, leg: PlacedDecode, error: BatonError, now: float, *, cancel: bool
) -> None:
    book.end_decode(request, now, "failed", cancel=cancel)
    if isinstance(error, FATAL):
        if _may_be_of_one_given_up(request):
            book.settle(request, now)
        else:
            _give_up_decode(book, request, leg, error, now)
        return
    counted = blame(book, request, leg, Role.DECODE, error, now)
    book.settle(request, now, refused=not counted)


def _give_up_decode(book: Book, request: Request, leg: PlacedDecode, error: BatonError, now: float) -> None:
    """Ends the request, whose decode leg has ended by a fatal error, unless another engine may serve it."""
    if not _goes_to_another_engine(book, request, leg, error):
        book.fail(request, error, now)
        return
    if request.prefill is not None:  # its engine's other workers would not serve it either
        book.end_prefill(request, now, "failed")
    book.settle(request, now, refused=True)


def _goes_to_another_engine(book: Book, request: Request, leg: PlacedLeg, error: BatonError) -> bool:
    """Returns whether the error says that the leg's engine does not serve such a request, and a ready worker of another
    engine may; notes it if so."""
    if not isinstance(error, UnsupportedModel) or leg.worker.roles is Role.STORE:
        return False
    unserved_by = request.setbacks.unserved_by | {leg.worker.fingerprint.engine}
    job = replace(request.next_job(), unserved_by=unserved_by)
    if not book.workers.cluster.everyone.fit(job).can_begin:
        return False
    request.setbacks.unserved_by = unserved_by
    return True


def _may_be_of_one_given_up(request: Request) -> bool:
    """Returns whether what failed the leg may be an answer that was given up, before its worker knew.

    Then the others go on, each by itself: one that is at fault fails again, by a leg of its own.
    """
    comes_apart = request.prefill is None and len(request.answers) > 1
    return comes_apart and any(answer.given_up for answer in request.answers)


def source_gone(book: Book, request: Request, now: float, outcome: str, *, cancel: bool) -> None:
    """Ends the prefill leg. A decode leg, or a store, may have fetched everything: it has `orphan_timeout_s` to say
    so."""
    book.end_prefill(request, now, outcome, cancel=cancel)
    if request.park is not None:
        request.park.orphaned_s = book.awake.at(now)
        book.silent_legs.set(request.park.orphaned_s + book.config.orphan_timeout_s, request.park.leg)
    if request.decode is not None:
        request.decode.orphaned_s = book.awake.at(now)
        book.silent_legs.set(request.decode.orphaned_s + book.config.orphan_timeout_s, request.decode.leg)


def blame(book: Book, request: Request, leg: PlacedLeg, role: Role, error: BatonError, now: float) -> bool:
    """Counts a failure against the worker and, unless that is a store, the request. Returns whether the leg was lost,
    and not only refused: by a worker that takes no such commands any more, and was told so while this one was on its
    way.
    """
    worker = leg.worker
    if takes_no_more(book, worker, role, error, now):
        return False
    if isinstance(error, SequencePreempted):  # the pool was too small for all
        return True
    if worker.roles is not Role.STORE:  # its help is no condition: whatever befalls it must not use a request up
        _count(book, request, leg.leg, Crash(worker.worker_id, worker.incarnation, role, session_lost=False), now)
    book.workers.failed(worker.worker_id, f"{error.reason}: {error}", now)
    return True


def takes_no_more(book: Book, worker: WorkerInfo, role: Role, error: BatonError, now: float) -> bool:
    """Returns whether the error says that the worker takes no commands of this phase any more, and notes it if so."""
    if isinstance(error, Draining):
        leaves(book, worker, now)
        return True
    if not isinstance(error, RoleGone):
        return False
    current = book.workers.current(worker.worker_id, worker.incarnation)
    if current is not None:
        book.workers.drop_role(current, role, now)
    return True


def leaves(book: Book, worker: WorkerInfo, now: float) -> None:
    """Notes that a worker is draining, which another worker may have learned before this router did."""
    current = book.workers.current(worker.worker_id, worker.incarnation)
    if current is not None:
        book.workers.drain(current, now)


def is_leaving(book: Book, worker: WorkerInfo) -> bool:
    """Returns whether this incarnation drains: then its failures are not counted."""
    if worker.worker_id not in book.workers:
        return False
    known = book.workers.get(worker.worker_id)
    return known.info.incarnation == worker.incarnation and known.draining


def note_failed_import(book: Book, request: Request, leg: int, source: WorkerInfo, now: float) -> None:
    """Counts a failed import against the request's decode role, whoever is to blame, so that the source is avoided.

    `leg` is a leg that took part in it. One from a store does not count: the prompt can be computed without it.
    """
    if source.roles is Role.STORE:
        return
    crash = Crash(source.worker_id, source.incarnation, Role.DECODE, session_lost=False, failed_import=True)
    _count(book, request, leg, crash, now)


def _count(book: Book, request: Request, leg: int, crash: Crash, now: float) -> None:
    """Counts a crash against the request, unless its leg was opened before the last crash that was counted.

    One fault, of a rack for instance, may have ended both legs. For the same reason the last attempt is delayed by
    `last_chance_pause_s`, until all workers that were lost together have been noticed.
    """
    if leg <= request.setbacks.newest_leg_at_crash:
        return
    request.setbacks.newest_leg_at_crash = book.newest_leg
    request.setbacks.crashes.append(crash)
    book.crashed.add(request.key)
    taken_away = crash.session_lost or crash.failed_import
    if taken_away and len(request.setbacks.crashes) == book.config.max_crashes - 1:
        request.setbacks.not_before_s = now + book.config.last_chance_pause_s


def lapsed(book: Book, request: Request, leg: PlacedDecode, now: float) -> None:
    """Counts a lease that ended while this leg had it, against the pair and the request's decode role.

    The source's clocks may end the lease before the destination gives up the fetch; then no other report counts it.
    """
    source = leg.lapsed_source
    if source is not None and not is_leaving(book, source):
        reason = "the lease ended before its blocks were taken over"
        book.workers.transfer_failed(source, leg.worker.worker_id, reason, now)
        note_failed_import(book, request, leg.leg, source, now)


def is_the_pairs(error: BatonError) -> bool:
    """Returns whether a failed import counts against the pair, and not only against this lease."""
    return not isinstance(error, (LeaseInvalid, StaleIncarnation, Draining, Cancelled, *FATAL))


def note_refusal(book: Book, request: Request, leg: PlacedLeg, worker: Worker, now: float) -> None:
    before = request.setbacks.refusals.get(worker.info.worker_id)
    count = before.count + 1 if before else 1
    config = book.config
    delay_s = min(config.max_refusal_backoff_s, config.refusal_backoff_s * 2.0 ** min(count - 1, 16))
    jitter = 0.75 + 0.25 * (leg.leg * 0.618034 % 1.0)  # spreads retries, repeatably
    load = worker.view().load
    request.setbacks.refusals[worker.info.worker_id] = BackOff(load, now + delay_s * jitter, count)


def worker_gone(
    book: Book,
    worker: Worker,
    legs: dict[int, str],
    now: float,
    *,
    crashed: bool,
    in_order: bool = False,
    stuck: bool = False,
) -> None:
    """Ends all legs at a worker that is lost or stuck, or has ended its session `in_order`.

    `legs` holds the legs that were current at the loss, with their requests' keys. With `stuck` the session is still
    open, so the legs are cancelled too, although the worker may never read that.
    """
    newest_legs = {key: leg for leg, key in sorted(legs.items())}
    requests = {key: book.requests.get(key) for key in newest_legs}
    for key, newest in newest_legs.items():
        with book.isolated("event", request := requests[key], now):
            assert request is not None, f"worker {worker.info.worker_id} has legs of no request"
            if book.requests.get(key) is not request:
                continue  # it has ended with another part of the same request
            refused = in_order and _never_read(request, legs)
            _worker_gone_under(book, worker, legs, request, newest, now, crashed=crashed, stuck=stuck, refused=refused)
    if not stuck:
        # A leg is left only after a defect, which was reported; it must not keep the worker from joining again.
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
    refused: bool,
) -> None:
    outcome, role = "stuck" if stuck else "lost", Role.PREFILL
    if request.decode is not None and request.decode.leg in legs:
        role = Role.DECODE
        book.end_decode(request, now, outcome, cancel=stuck)
    if request.prefill is not None and request.prefill.leg in legs:
        if request.prefill.sealed_s is None:
            role = Role.PREFILL
        source_gone(book, request, now, outcome, cancel=stuck)
    if request.park is not None and request.park.leg in legs:
        book.end_park(request, now, outcome, cancel=stuck)
    if crashed and worker.info.roles is not Role.STORE:
        crash = Crash(worker.info.worker_id, worker.info.incarnation, role, session_lost=not stuck)
        request.setbacks.crashes = [each for each in request.setbacks.crashes if not each.foretold(crash)]
        _count(book, request, newest, crash, now)
    book.settle(request, now, refused=refused)


def _never_read(request: Request, legs: Container[int]) -> bool:
    """Returns whether the worker has begun none of the request's legs there: whoever ends its session in order has
    answered each that it read, so that these crossed the end on their way."""
    prefill, decode = request.prefill, request.decode
    if prefill is not None and prefill.leg in legs and prefill.lease is not None:
        return False
    return decode is None or decode.leg not in legs or decode.admitted_s is None


def worker_alive(book: Book, worker: Worker) -> None:
    """Forgets the crashes that were assumed when this incarnation's session broke: it is back, so it did not crash."""
    back = (worker.info.worker_id, worker.info.incarnation)
    for key in book.crashed:
        setbacks = book.requests[key].setbacks
        setbacks.crashes = [crash for crash in setbacks.crashes if not crash.session_lost or crash.process != back]


def migrate(book: Book, worker: Worker, now: float) -> int:
    """Ends all legs at `worker`, so that their requests go on elsewhere. Returns how many requests these are."""
    requests = {key: book.requests[key] for key in worker.legs.values()}
    legs = set(worker.legs)
    for key, request in requests.items():
        with book.isolated("event", request, now):
            if book.requests.get(key) is not request:
                continue  # it has ended with another part of the same request
            if request.decode is not None and request.decode.leg in legs:
                book.end_decode(request, now, "migrated")
            if request.prefill is not None and request.prefill.leg in legs:
                source_gone(book, request, now, "migrated", cancel=True)
            if request.park is not None and request.park.leg in legs:
                book.end_park(request, now, "migrated")
            book.settle(request, now)
    return len(requests)
