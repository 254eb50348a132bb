"""Who may wait in the queue, and for how long: refusals at the door, and of what waits in vain. Pure.

Owns: load shedding and the bounds on waiting. Never: the queue's order (`waitlist`), or what work costs (`policy`).

A deadline that cannot be met is refused at once, not when it has passed. If what is queued stands in the way, the
client hears RESOURCE_EXHAUSTED and when to try again; if even an idle cluster were too slow, DEADLINE_EXCEEDED, since
another try would not help. A busy cluster also refuses what it expects to finish late: taken on, it would make others
late too. In a full queue an arrival takes the place of the youngest request of the lowest priority,
if its own is higher.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.core.errors import BatonError, DeadlineExceeded, NoWorker, Overloaded
from services.router.coordinator.book import Book
from services.router.coordinator.dispatch import can_be_served
from services.router.coordinator.requests import Phase, Request, RequestSpec
from services.router.policy import Ahead, Costs, Work


def admit(book: Book, spec: RequestSpec, max_tokens: int, now: float) -> None:
    """Sees that there is a place in the queue, and a point in taking it. Raises Overloaded or DeadlineExceeded.

    max_tokens: the longest output, as far as the context lets it.
    """
    if spec.deadline_s is not None:
        before = [other for other in book.queue if other.spec.priority >= spec.priority]
        ahead = Ahead(sum(map(_num_tokens, before)), len(before) + _num_on_their_way(book))
        error = _hopeless(book, _costs(book), spec, max_tokens, ahead, now)
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
    ahead = Ahead(0, _num_on_their_way(book))
    for request in book.queue:
        assert costs is not None
        error = None if request.output else _hopeless(book, costs, request.spec, request.max_tokens, ahead, now)
        if error is None:
            ahead = Ahead(ahead.num_tokens + _num_tokens(request), ahead.num_sequences + 1)
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


def _num_on_their_way(book: Book) -> int:
    """Requests between the queue and a decode worker."""
    return sum(request.phase in (Phase.PREFILLING, Phase.PARKED) for request in book.requests.values())


def _hopeless(
    book: Book, costs: Costs, spec: RequestSpec, max_tokens: int, ahead: Ahead, now: float
) -> BatonError | None:
    """Where there is no doubt, the bounds missing the deadline by far; and where others would pay for the attempt."""
    if spec.deadline_s is None:
        return None
    forecast = costs.forecast(_work(book, spec, max_tokens), ahead, overtakes=spec.priority > 0)
    remaining_s = max(0.0, spec.deadline_s - now)
    tolerable_s = remaining_s * book.config.deadline_margin
    if forecast is None:
        return None
    if forecast.run_s > tolerable_s:
        return DeadlineExceeded(f"cannot be met: {forecast.run_s:.2f} s of work, {remaining_s:.2f} s left")
    crowded = forecast.expected_s > forecast.alone_s * book.config.crowded_factor
    if forecast.wait_s + forecast.run_s <= tolerable_s and not (crowded and forecast.expected_s > remaining_s):
        return None
    retry_after_s = max(book.config.retry_after_s, forecast.wait_s)
    message = (
        f"the deadline cannot be met: {forecast.expected_s:.2f} s with what is before it, {remaining_s:.2f} s left"
    )
    return Overloaded(message, retry_after_s=retry_after_s)


def _work(book: Book, spec: RequestSpec, max_tokens: int) -> Work:
    """Expects an output as long as others' were, within its own bounds; before the first, the shortest."""
    fewest = min(spec.min_tokens, max_tokens)  # more are asked for than the context holds: it ends there
    expected = max(float(fewest), book.typical_output_tokens or 0.0)
    return Work(len(spec.token_ids), fewest, min(expected, float(max_tokens)))
