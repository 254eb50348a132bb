"""Who may wait in the queue, and for how long: refusals at the door, and of what waits in vain. Pure.

Owns: load shedding and the bounds on waiting. Never: the queue's order (`book`), or what work costs (`policy`).

A deadline that cannot be met is refused at once, not when it has passed. If what is queued stands in the way, the
client hears RESOURCE_EXHAUSTED and when to try again; if even an idle cluster were too slow, DEADLINE_EXCEEDED, since
another try would not help. A busy cluster also refuses what it expects to finish late: taken on, it would make others
late too. In a full queue an arrival takes the place of the youngest request of the lowest priority,
if its own is higher.
"""

from __future__ import annotations

from services.core.errors import BatonError, DeadlineExceeded, NoWorker, Overloaded
from services.router.coordinator.book import Book
from services.router.coordinator.dispatch import can_be_served, why_unserved
from services.router.coordinator.events import ExpectedRequest, RequestSpec
from services.router.coordinator.request import Phase, Request
from services.router.policy import Ahead, Costs, Work


def admit(book: Book, spec: RequestSpec, max_tokens: int, now: float) -> None:
    """Sees that there is a place in the queue, and a point in taking it. Raises Overloaded or DeadlineExceeded.

    max_tokens: the longest output, as far as the context lets it.
    """
    _not_hopeless(book, spec, _work(book, len(spec.token_ids), spec.min_tokens, max_tokens), now)
    if len(book.queue) + book.num_expected < book.config.max_queue:
        return
    victim = next((request for request in reversed(list(book.queue)) if not request.output), None)
    if victim is None or victim.spec.priority >= spec.priority:
        raise Overloaded("the queue is full", retry_after_s=book.config.retry_after_s)
    crowded_out = Overloaded("crowded out by a higher priority", retry_after_s=book.config.retry_after_s)
    book.fail_surely(victim, crowded_out, now)


def end_overdue(book: Book, now: float) -> None:
    """Fails live requests whose time is up, and queued ones whose time is certain to be too short."""
    ringing = [book.requests[request_id] for request_id in book.deadlines.due(now)]
    for request in (*ringing, *book.queue, *book.parked):
        if request.request_id not in book.requests:
            continue  # it has just been ended, and stands in two of the lists
        with book.isolated("tick", request, now):
            if (error := _waited_too_long(book, request, now)) is not None:
                book.fail(request, error, now)
    _end_those_in_vain(book, now)


def expect(book: Book, expected: ExpectedRequest, max_tokens: int, now: float) -> None:
    """Does what `admit` does, before the prompt is tokenised, which costs time and memory as well. Nobody is crowded
    out yet: each queued request that could be counts as one more place. Raises Overloaded or DeadlineExceeded."""
    work = _work(book, expected.fewest_tokens, expected.min_tokens, max_tokens)
    _not_hopeless(book, expected, work, now, before_s=expected.tokenise_s)
    num_beyond = len(book.queue) + book.num_expected - book.config.max_queue
    if num_beyond < 0:
        return
    if num_beyond >= sum(not request.output and request.spec.priority < expected.priority for request in book.queue):
        raise Overloaded("the queue is full", retry_after_s=book.config.retry_after_s)


def _end_those_in_vain(book: Book, now: float) -> None:
    """Queued requests that have received nothing yet: what has begun goes on to its deadline."""
    if not len(book.queue):
        return
    costs, longest = _costs(book), book.workers.cluster.whole.longest_sequence
    ahead = Ahead(0, _num_on_their_way(book))
    for request in book.queue:
        with book.isolated("tick", request, now):
            spec = request.spec
            work = _work(book, len(spec.token_ids), spec.min_tokens, request.max_tokens)
            error = None if request.output else _hopeless(book, costs, spec, work, ahead, now)
            if error is not None:
                book.fail(request, error, now)
                continue
        if request.total_tokens > longest:
            continue  # in nobody's way
        ahead = Ahead(ahead.num_tokens + _num_tokens(request), ahead.num_sequences + 1)


def passed_deadline(request: Request, now: float) -> DeadlineExceeded | None:
    deadline_s = request.spec.deadline_s
    return DeadlineExceeded("the deadline passed") if deadline_s is not None and now >= deadline_s else None


def _waited_too_long(book: Book, request: Request, now: float) -> BatonError | None:
    if (error := passed_deadline(request, now)) is not None:
        return error
    if request.phase not in (Phase.QUEUED, Phase.PARKED):
        return None
    config = book.config
    if can_be_served(book, request):
        request.unserved_since_s = None
    elif request.unserved_since_s is None:
        request.unserved_since_s = now
    elif now - request.unserved_since_s >= config.no_worker_timeout_s:
        return NoWorker(why_unserved(book, request), retry_after_s=config.retry_after_s)
    if now - request.waiting_since_s >= config.queue_timeout_s:
        return Overloaded("no room became free in time", retry_after_s=config.retry_after_s)
    return None


def _num_tokens(request: Request) -> int:
    return len(request.spec.token_ids) + len(request.output)


def _costs(book: Book) -> Costs:
    return Costs.of(book.workers.views())


def _num_on_their_way(book: Book) -> int:
    """Requests between the queue and a decode worker."""
    return book.num_in[Phase.PREFILLING] + book.num_in[Phase.PARKED]


def _not_hopeless(
    book: Book, spec: RequestSpec | ExpectedRequest, work: Work, now: float, *, before_s: float = 0.0
) -> None:
    if spec.deadline_s is None:
        return
    # What no ready worker could serve is in nobody's way.
    longest = book.workers.cluster.whole.longest_sequence
    before = [other for other in book.queue if other.spec.priority >= spec.priority and other.total_tokens <= longest]
    ahead = Ahead(sum(map(_num_tokens, before)), len(before) + _num_on_their_way(book))
    error = _hopeless(book, _costs(book), spec, work, ahead, now, before_s=before_s)
    if error is not None:
        raise error


def _hopeless(
    book: Book,
    costs: Costs,
    spec: RequestSpec | ExpectedRequest,
    work: Work,
    ahead: Ahead,
    now: float,
    *,
    before_s: float = 0.0,
) -> BatonError | None:
    """Where there is no doubt, the bounds missing the deadline by far; and where others would pay for the attempt.
    `before_s`: until it can be queued."""
    if spec.deadline_s is None:
        return None
    forecast = costs.forecast(work, ahead, overtakes=spec.priority > 0)
    remaining_s = max(0.0, spec.deadline_s - now)
    tolerable_s = remaining_s * book.config.deadline_margin
    if forecast is None:
        return None
    if forecast.run_s > tolerable_s:
        return DeadlineExceeded(f"cannot be met: {forecast.run_s:.2f} s of work, {remaining_s:.2f} s left")
    wait_s, expected_s = before_s + forecast.wait_s, before_s + forecast.expected_s
    crowded = expected_s > forecast.alone_s * book.config.crowded_factor
    if wait_s + forecast.run_s <= tolerable_s and not (crowded and expected_s > remaining_s):
        return None
    retry_after_s = max(book.config.retry_after_s, wait_s)
    message = f"the deadline cannot be met: {expected_s:.2f} s with what is before it, {remaining_s:.2f} s left"
    return Overloaded(message, retry_after_s=retry_after_s)


def _work(book: Book, num_tokens: int, min_tokens: int, max_tokens: int) -> Work:
    """Expects an output as long as others' were, within its own bounds; before the first, the shortest."""
    fewest = min(min_tokens, max_tokens)  # more are asked for than the context holds: it ends there
    expected = max(float(fewest), book.typical_output_tokens or 0.0)
    return Work(num_tokens, fewest, min(expected, float(max_tokens)))
