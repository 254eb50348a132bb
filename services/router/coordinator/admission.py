"""Who may wait in the queue, and for how long: refusals at the door, and of what waits in vain. Pure.

Owns: load shedding and the bounds on waiting. Never: the queue's order (`waitlist`), or what work costs (`policy`).

A deadline that cannot be met is refused at once, not when it has passed. If what is queued stands in the way, the
client hears RESOURCE_EXHAUSTED and when to try again; if even an idle cluster were too slow, DEADLINE_EXCEEDED, since
another try would not help. In a full queue an arrival takes the place of the youngest request of the lowest priority,
if its own is higher.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.core.errors import BatonError, DeadlineExceeded, NoWorker, Overloaded
from services.router.coordinator.book import Book
from services.router.coordinator.dispatch import can_be_served
from services.router.coordinator.requests import Phase, Request, RequestSpec
from services.router.policy import Costs


def admit(book: Book, spec: RequestSpec, now: float) -> None:
    """Sees that there is a place in the queue, and a point in taking it. Raises Overloaded or DeadlineExceeded."""
    if spec.deadline_s is not None:
        tokens_ahead = sum(_num_tokens(other) for other in book.queue if other.spec.priority >= spec.priority)
        error = _hopeless(book, _costs(book), spec, tokens_ahead, now)
        if error is not None:
            raise error
    if len(book.queue) < book.config.max_queue:
        return
    victim = next((request for request in reversed(list(book.queue)) if not request.output), None)
    if victim is None or victim.spec.priority >= spec.priority:
        raise Overloaded("the queue is full", retry_after_s=book.config.retry_after_s)
    crowded_out = Overloaded("crowded out by a higher priority", retry_after_s=book.config.retry_after_s)
    book.fail(victim, crowded_out, now)


def overdue(book: Book, now: float) -> list[tuple[Request, BatonError]]:
    """Live requests whose time is up, or certain to be."""
    in_vain = dict(_wait_in_vain(book, now))
    ended = (
        (request, _waited_too_long(book, request, now) or in_vain.get(request_id))
        for request_id, request in book.requests.items()
    )
    return [(request, error) for request, error in ended if error is not None]


def _wait_in_vain(book: Book, now: float) -> Iterator[tuple[str, BatonError]]:
    """Queued requests that have received nothing yet: what has begun goes on to its deadline."""
    costs = _costs(book) if len(book.queue) else None
    tokens_ahead = 0
    for request in book.queue:
        assert costs is not None
        error = None if request.output else _hopeless(book, costs, request.spec, tokens_ahead, now)
        if error is None:
            tokens_ahead += _num_tokens(request)
        else:
            yield request.request_id, error


def passed_deadline(request: Request, now: float) -> DeadlineExceeded | None:
    deadline_s = request.spec.deadline_s
    return DeadlineExceeded("the deadline passed") if deadline_s is not None and now >= deadline_s else None


def _waited_too_long(book: Book, request: Request, now: float) -> BatonError | None:
    if (error := passed_deadline(request, now)) is not None:
        return error
    if request.phase not in (Phase.QUEUED, Phase.PARKED):
        request.unserved_since_s = None
        return None
    config = book.config
    if can_be_served(book, request):
        request.unserved_since_s = None
    elif request.unserved_since_s is None:
        request.unserved_since_s = now
    elif now - request.unserved_since_s >= config.no_worker_timeout_s:
        return NoWorker("no worker that could serve this is ready", retry_after_s=config.retry_after_s)
    if now - request.waiting_since_s >= config.queue_timeout_s:
        return Overloaded("no room became free in time", retry_after_s=config.retry_after_s)
    return None


def _num_tokens(request: Request) -> int:
    return len(request.spec.token_ids) + len(request.output)


def _costs(book: Book) -> Costs:
    return Costs.of(book.workers.views())


def _hopeless(book: Book, costs: Costs, spec: RequestSpec, tokens_ahead: int, now: float) -> BatonError | None:
    """Only where there is no doubt: the forecast must miss the deadline by far."""
    if spec.deadline_s is None:
        return None
    ahead = costs.forecast(len(spec.token_ids), spec.min_tokens, tokens_ahead, overtakes=spec.priority > 0)
    remaining_s = max(0.0, spec.deadline_s - now)
    tolerable_s = remaining_s * book.config.deadline_margin
    if ahead is None or ahead.wait_s + ahead.run_s <= tolerable_s:
        return None
    if ahead.run_s > tolerable_s:
        return DeadlineExceeded(f"cannot be met: {ahead.run_s:.2f} s of work, {remaining_s:.2f} s left")
    retry_after_s = max(book.config.retry_after_s, ahead.wait_s)
    message = f"the deadline cannot be met: {ahead.wait_s:.2f} s of work before it, {remaining_s:.2f} s left"
    return Overloaded(message, retry_after_s=retry_after_s)
