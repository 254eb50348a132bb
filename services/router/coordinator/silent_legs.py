"""Ends legs of which nothing is heard although their workers' heartbeats come. Pure.

Owns: the comparison of the legs that a worker lists with those that the router believes to be there, and the bounds on
how long nothing may be heard of a leg. So every phase ends, whatever a worker does. Never: what a worker does with a
cancel.

A worker lists its live legs in its heartbeats, with the highest leg number that it has received. Only legs up to that
number are judged. Whatever the worker reported of them came earlier in the same stream, so a leg that is missing is
lost. A leg that is listed and silent has two bounds. If its worker has nothing to do, by all snapshots of
`answer_timeout_s`, it should have begun or gone on, and the worker has failed. A busy worker is not to blame for its
queue, so there the bound is that of the router's own queue plus the time to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from services.core.errors import Overloaded, ProtocolViolation
from services.router.coordinator.book import Book
from services.router.coordinator.handoff import decode_failed, lapsed, prefill_failed
from services.router.coordinator.parking import park_failed, park_orphaned
from services.router.coordinator.request import PlacedDecode, PlacedLeg, PlacedPark, Request
from services.router.coordinator.workers import Worker

_SLACK_S = 1e-6
"""Alarms ring this much early, since a rounding error in a sum of times must not delay a check by a whole tick. The
check itself compares exactly."""
_MOST_CANCELS = 256
"""The most unknown legs cancelled after one heartbeat; the next one lists the rest again."""


def reconcile(
    book: Book,
    worker: Worker,
    newest_leg: int,
    live: Collection[int],
    is_canary: Callable[[int], bool],
    now: float,
) -> None:
    """Compares the legs that a worker's heartbeat lists with those that the router believes to be there.

    Cancels legs that the router does not know, and ends those that the worker no longer has. `newest_leg` is the
    highest leg number that the worker has received.
    """
    unknown = [leg for leg in live if leg not in worker.legs and leg not in book.legs and not is_canary(leg)]
    for leg in unknown[:_MOST_CANCELS]:
        book.cancel_leg(worker.info, leg)
    if newest_leg > book.newest_leg:
        return  # this router never sent such a leg, so the worker's list cannot be trusted
    for leg in [leg for leg in worker.legs if leg <= newest_leg and leg not in live]:
        request = book.legs.get(leg)
        with book.isolated("event", request, now):
            if request is not None:
                _lost(book, request, leg, now)


def _lost(book: Book, request: Request, leg: int, now: float) -> None:
    error = ProtocolViolation("its worker has lost the leg")
    if request.prefill is not None and request.prefill.leg == leg:
        prefill_failed(book, request, request.prefill, error, now, cancel=True)
    elif request.decode is not None and request.decode.leg == leg:
        decode_failed(book, request, request.decode, error, now, cancel=True)
    elif request.park is not None and request.park.leg == leg:
        park_failed(book, request, request.park, error, now, cancel=True)


def expire_legs(book: Book, now: float) -> None:
    """Ends the legs of which nothing was heard for too long.

    Checks the legs whose alarms ring, and those of workers that have been at rest for `answer_timeout_s`.
    """
    awake_s = book.awake.at(now)
    for leg in book.silent_legs.due(awake_s + _SLACK_S):
        if (request := book.legs.get(leg)) is not None and request.leg(leg) is not request.released:
            with book.isolated("tick", request, now):
                _expire_unanswered(book, request, now)
                _expire_park(book, request, now)
                _expire_silent(book, request, now)
                if leg in book.legs:
                    book.silent_legs.set(_next_look_s(book, request, leg, awake_s), leg)
    for worker in book.workers.all():
        if worker.at_rest_since_s is None or worker.spoke_s - worker.at_rest_since_s < book.config.answer_timeout_s:
            continue
        for leg in list(worker.legs):
            if (request := book.legs.get(leg)) is not None:
                with book.isolated("tick", request, now):
                    _expire_silent(book, request, now)


def _next_look_s(book: Book, request: Request, leg: int, awake_s: float) -> float:
    """Returns the earliest time, in awake time, at which the leg can have been silent for too long."""
    config = book.config
    for current in (request.prefill, request.decode, request.park):
        if current is None or current.leg != leg:
            continue
        if isinstance(current, PlacedPark):
            return max(awake_s, _end_of_park_s(book, current))
        bounds_s = [current.heard_s + config.queue_timeout_s]
        if isinstance(current, PlacedDecode):
            if current.has_handoff and current.admitted_s is None:
                bounds_s.append(current.asked_s + config.answer_timeout_s)
            if current.orphaned_s is not None:
                bounds_s.append(current.orphaned_s + config.orphan_timeout_s)
        return max(awake_s, min(bounds_s))
    return awake_s + book.soonest_silence_s  # the leg has ended or was released: the alarm will be dropped


def _expire_unanswered(book: Book, request: Request, now: float) -> None:
    """Ends a decode leg that owes an answer: to its command, or on whether it had everything when its source ended."""
    leg, awake_s = request.decode, book.awake.at(now)
    if leg is None or not leg.has_handoff:
        return
    if leg.orphaned_s is not None and awake_s - leg.orphaned_s >= book.config.orphan_timeout_s:
        # The end of its source was counted before, or `lapsed` counts it now.
        book.end_decode(request, now, "orphaned")
        lapsed(book, request, leg, now)
        book.settle(request, now)
    elif leg.admitted_s is None and awake_s - leg.asked_s >= book.config.answer_timeout_s:
        decode_failed(book, request, leg, ProtocolViolation("no answer to a handoff"), now, cancel=True)


def _end_of_park_s(book: Book, leg: PlacedPark) -> float:
    """Returns when a store must have said more of its leg, in awake time."""
    config = book.config
    within_s = config.answer_timeout_s if leg.admitted_s is None else config.queue_timeout_s
    end_s = leg.heard_s + within_s
    return end_s if leg.orphaned_s is None else min(end_s, leg.orphaned_s + config.orphan_timeout_s)


def _expire_park(book: Book, request: Request, now: float) -> None:
    """Ends a store's leg that owes an answer: to its command, or on whether it had everything when its source ended."""
    leg, awake_s = request.park, book.awake.at(now)
    if leg is None or awake_s < _end_of_park_s(book, leg):
        return
    if leg.orphaned_s is not None and awake_s - leg.orphaned_s >= book.config.orphan_timeout_s:
        park_orphaned(book, request, leg, now)
    else:
        error = ProtocolViolation("a store does not say what became of a handoff")
        park_failed(book, request, leg, error, now, cancel=True)


def _expire_silent(book: Book, request: Request, now: float) -> None:
    """Ends the leg that is to act next if it has been silent for too long; a leg that waits for the other has no bound.

    The request fails instead if the worker is busy and has not begun the leg.
    """
    source, leg = request.prefill, request.decode
    if source is not None and source.sealed_s is None:
        error = _silent_too_long(book, request, source, begun=source.lease is not None, now=now)
        if isinstance(error, ProtocolViolation):
            prefill_failed(book, request, source, error, now, cancel=True)
    elif leg is not None and (leg.admitted_s is not None or not leg.has_handoff):
        error = _silent_too_long(book, request, leg, begun=leg.admitted_s is not None, now=now)
        if isinstance(error, ProtocolViolation):
            decode_failed(book, request, leg, error, now, cancel=True)
    else:
        return
    if isinstance(error, Overloaded):
        book.fail(request, error, now)


def _silent_too_long(
    book: Book, request: Request, leg: PlacedLeg, *, begun: bool, now: float
) -> Overloaded | ProtocolViolation | None:
    worker, config = book.workers.get(leg.worker.worker_id), book.config
    if worker.load_s is not None and worker.at_rest_since_s is not None:
        # The silence is measured to the worker's newest snapshot, not to the present: a router that was stopped has not
        # read what the worker sent meanwhile.
        silent_s = worker.spoke_s - max(leg.heard_s, worker.at_rest_since_s)
        if silent_s >= config.answer_timeout_s:
            return ProtocolViolation(
                f"its worker has had nothing to do for {silent_s:.0f} s and does not go on with it"
            )
    silent_s = book.awake.at(now) - leg.heard_s
    if silent_s < config.queue_timeout_s + config.compute_margin * _compute_s(request, worker):
        return None
    if begun:
        return ProtocolViolation(f"nothing was heard of it for {silent_s:.0f} s")
    return Overloaded("no room became free at its worker in time", retry_after_s=config.retry_after_s)


def _compute_s(request: Request, worker: Worker) -> float:
    """Returns the seconds that the worker needs for the request's prompt and those queued there, by its own figures."""
    if worker.load is None:
        return 0.0
    num_tokens = len(request.spec.token_ids) + len(request.output) + worker.load.queued_prefill_tokens
    return num_tokens * worker.load.ms_per_prefill_token / 1000
