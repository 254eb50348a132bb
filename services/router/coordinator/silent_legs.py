"""Legs of which nothing is heard although their workers' heartbeats come. Pure.

Owns: the comparison of what a worker says it has with what the router believes it has, and the bounds on how long a leg
may say nothing. So every phase ends: none rests on a worker's goodwill. Never: what a worker does with a cancel.

A worker lists its live legs in its heartbeats, with the highest leg number that it has received. Only legs up to that
number are judged, and what it said of them before came before in the same stream: so one that is missing is lost.
A leg that is listed and says nothing is bounded in two ways. If its worker works on nothing at all, by all snapshots of
`answer_timeout_s`, it should have begun or gone on: the worker has failed. A busy one is not to blame for a queue, so
there the bound is that of the router's own queue, and time to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from services.core.errors import Overloaded, ProtocolViolation
from services.router.coordinator.actions import CancelLeg
from services.router.coordinator.book import Book
from services.router.coordinator.handoff import decode_failed, lapsed, prefill_failed
from services.router.coordinator.request import PlacedDecode, PlacedLeg, Request
from services.router.coordinator.workers import Worker

_SLACK_S = 1e-6
"""Of alarms: a rounding error in a sum of times must not cost a whole tick. What is asked then compares exactly."""
_MOST_CANCELS = 256
"""After one heartbeat; the next one lists the rest again."""


def reconcile(
    book: Book,
    worker: Worker,
    newest_leg: int,
    live: Collection[int],
    is_canary: Callable[[int], bool],
    now: float,
) -> None:
    """Compares what one heartbeat of a worker lists with what the router believes to be there."""
    unknown = [leg for leg in live if leg not in worker.legs and leg not in book.legs and not is_canary(leg)]
    for leg in unknown[:_MOST_CANCELS]:
        book.actions.append(CancelLeg(worker.info.worker_id, worker.info.incarnation, leg))
    if newest_leg > book.newest_leg:
        return  # nobody has sent it such a leg, so what it says of the others means nothing
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


def expire_legs(book: Book, now: float) -> None:
    """Ends the legs of which nothing was heard for too long: looks at those whose alarms ring, and at those of workers
    that have been at rest for as long as a leg may be silent there."""
    awake_s = book.awake.at(now)
    for leg in book.silent_legs.due(awake_s + _SLACK_S):
        if (request := book.legs.get(leg)) is not None and leg != request.released_leg:
            with book.isolated("tick", request, now):
                _expire_unanswered(book, request, now)
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
    """Before then it cannot have been silent for too long, whatever becomes of it meanwhile; in awake time."""
    config = book.config
    for current in (request.prefill, request.decode):
        if current is None or current.leg != leg:
            continue
        bounds_s = [current.heard_s + config.queue_timeout_s]
        if isinstance(current, PlacedDecode):
            if current.has_handoff and current.admitted_s is None:
                bounds_s.append(current.asked_s + config.answer_timeout_s)
            if current.orphaned_s is not None:
                bounds_s.append(current.orphaned_s + config.orphan_timeout_s)
        return max(awake_s, min(bounds_s))
    return awake_s + config.soonest_silence_s  # no leg of its any more, or released: it is not looked at again


def _expire_unanswered(book: Book, request: Request, now: float) -> None:
    """The two answers that a decode worker owes at once, in the time in which they could be heard."""
    leg, awake_s = request.decode, book.awake.at(now)
    if leg is None or not leg.has_handoff:
        return
    if leg.orphaned_s is not None and awake_s - leg.orphaned_s >= book.config.orphan_timeout_s:
        # What became of its source was counted, or counts now.
        book.end_decode(request, now, "orphaned")
        lapsed(book, request, leg, now)
        book.settle(request, now)
    elif leg.admitted_s is None and awake_s - leg.asked_s >= book.config.answer_timeout_s:
        decode_failed(book, request, leg, ProtocolViolation("no answer to a handoff"), now, cancel=True)


def _expire_silent(book: Book, request: Request, now: float) -> None:
    """Whoever waits for the other leg has no bound of its own."""
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
        # By what the worker has said, not by this router's clock: a router that was stopped has not listened.
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
    """What the worker needs for its prompt and those before it."""
    if worker.load is None:
        return 0.0
    num_tokens = len(request.spec.token_ids) + len(request.output) + worker.load.queued_prefill_tokens
    return num_tokens * worker.load.ms_per_prefill_token / 1000
