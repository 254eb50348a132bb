"""Decides which requests may wait in the queue, and for how long. Pure.

Owns: load shedding and the bounds on waiting. Never: the queue's order (`queue.py`), or what work costs (`policy`).

A request whose deadline cannot be met is refused at once, not when the deadline has passed. If queued work stands in
the way, the client gets RESOURCE_EXHAUSTED and a time to try again; if even an idle cluster would be too slow, it gets
DEADLINE_EXCEEDED, since another try would not help. A busy cluster also refuses a request that it expects to finish
late: to serve it would make others late too.

A full queue sheds low priorities and long outputs first. An arrival takes the place of a request of lower priority, the
lowest first and of these the one with the longest expected output; or of one of its own priority that no ready worker
could hold, or whose expected output is more than twice as long. Of those that could lose their places so, the one that
has waited longest keeps it: no class is kept out for ever. What has output is never pushed out, nor what has a worker.

All this is among one tenant's requests. Of several tenants, whoever has the most places for its weight, and any to
lose, is the first to lose one, whatever the priorities: a flood is refused, and nobody else because of it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from services.core.errors import BatonError, DeadlineExceeded, NoWorker, Overloaded
from services.router.coordinator.book import Book, Outlook
from services.router.coordinator.events import ExpectedRequest, RequestSpec
from services.router.coordinator.placement import can_be_served, why_unserved
from services.router.coordinator.queue import could_serve, order_of
from services.router.coordinator.request import Phase, Request
from services.router.policy import Ahead, Costs, Work


def admit(book: Book, spec: RequestSpec, max_tokens: int, now: float) -> None:
    """Checks that a request may be queued, and fails the queued request whose place it takes, if there is no other.

    `max_tokens` is the longest output that the request and the context allow. Raises DeadlineExceeded if the deadline
    is too short even for an idle cluster, and Overloaded if queued work stands in the way or the queue is full.
    """
    num_tokens = len(spec.token_ids)
    _check_deadline(book, spec, num_tokens, max_tokens, now)
    if len(book.queue) + book.num_expected < book.config.max_queue:
        return
    expected_tokens = book.expected_output(spec.tenant, num_tokens, spec.min_tokens, max_tokens)
    crowd, victims = _places_for(book, spec, num_tokens + max_tokens, expected_tokens)
    if not victims:
        if crowd is not None and crowd.num_expected and len(book.queue) < book.config.max_queue:
            return  # one of those will find the queue full
        raise Overloaded("the queue is full", retry_after_s=book.config.retry_after_s)
    crowded_out = Overloaded("crowded out of a full queue", retry_after_s=book.config.retry_after_s)
    book.fail_surely(victims[-1], crowded_out, now)


def end_overdue(book: Book, now: float) -> None:
    """Fails requests whose deadline has passed or that waited too long, and queued ones that cannot finish in time."""
    ringing = [book.requests[key] for key in book.deadlines.due(now)]
    for request in (*ringing, *book.queue, *book.queue.parked):
        if request.key not in book.requests:
            continue  # it is in two of the lists, or a part of what has just been ended
        with book.isolated("tick", request, now):
            if (error := _waited_too_long(book, request, now)) is not None:
                book.fail(request, error, now)
    book.outlook = None
    _fail_unmeetable(book, now)


def expect(book: Book, expected: ExpectedRequest, max_tokens: int, now: float) -> None:
    """Checks what `admit` does, before the prompt is tokenised, which costs time and memory as well.

    No queued request is failed yet: each one whose place could be taken counts as one more place. Raises what `admit`
    does.
    """
    _check_deadline(book, expected, expected.fewest_tokens, max_tokens, now, before_s=expected.tokenise_s)
    num_beyond = len(book.queue) + book.num_expected - book.config.max_queue
    if num_beyond < 0:
        return
    fewest_tokens = expected.fewest_tokens + expected.min_tokens
    expected_tokens = book.expected_output(expected.tenant, expected.fewest_tokens, expected.min_tokens, max_tokens)
    crowd, victims = _places_for(book, expected, fewest_tokens, expected_tokens)
    num_places = len(victims)
    if num_beyond >= num_places + (crowd.num_expected if crowd is not None else 0):
        raise Overloaded("the queue is full", retry_after_s=book.config.retry_after_s)


@dataclass(frozen=True, slots=True)
class _Crowd:
    """Is a tenant that has more places in the queue for its weight than another."""

    tenant: str
    num_expected: int
    """Its requests that are still being tokenised."""


def _places_for(
    book: Book, arrival: RequestSpec | ExpectedRequest, total_tokens: int, expected_tokens: int
) -> tuple[_Crowd | None, list[Request]]:
    """Returns the tenant that is to lose a place to the arrival, and what `_victims` says of it: the first of those
    with more places than the arrival's own, that has any to lose; None if it is that one itself."""
    lines = {line.share.tenant: line for line in book.queue.lines()}
    has_room = len(book.queue) < book.config.max_queue
    for crowd in _crowds(book, arrival):
        victims = _victims(book, arrival, crowd, lines.get(crowd.tenant, ()), total_tokens, expected_tokens)
        if victims or (crowd.num_expected and has_room):
            return crowd, victims
    return None, _victims(book, arrival, None, lines.get(arrival.tenant, ()), total_tokens, expected_tokens)


def _crowds(book: Book, arrival: RequestSpec | ExpectedRequest) -> list[_Crowd]:
    """Returns the tenants with more places for their weight than the arrival's has with it, the largest first."""
    places, expected, weights = Counter[str](), Counter[str](), {arrival.tenant: arrival.weight}
    for line in book.queue.lines():
        places[line.share.tenant] += len(line)
        weights.setdefault(line.share.tenant, line.share.weight)
    for share in book.expecting():
        expected[share.tenant] += share.num_expected
        weights.setdefault(share.tenant, share.weight)
    places[arrival.tenant] += 1
    places += expected
    ranked = sorted(((places[tenant] / weights[tenant], tenant) for tenant in places), reverse=True)
    mine = places[arrival.tenant] / arrival.weight
    return [_Crowd(tenant, expected[tenant]) for number, tenant in ranked if number > mine]


def _victims(
    book: Book,
    arrival: RequestSpec | ExpectedRequest,
    crowd: _Crowd | None,
    line: Iterable[Request],
    total_tokens: int,
    expected_tokens: int,
) -> list[Request]:
    """Returns the queued requests whose places a request may take, the best one last. `line` is that of `crowd`, or
    else of the arrival's own tenant.

    They have no output. Those that no ready worker could hold must not keep out what others could serve. Of the rest
    the one that has waited longest keeps its place, unless it is the queue's only one.
    """
    longest, priority = book.workers.cluster.everyone.longest_sequence, arrival.priority
    queued = [request for request in line if not request.output and not request.is_part]
    if crowd is not None:
        oldest = min(queued, key=_age, default=None)
        return [request for request in queued if request is not oldest]
    lower = [request for request in queued if request.spec.priority < priority]
    equal = [request for request in queued if request.spec.priority == priority]
    stranded = [request for request in equal if request.total_tokens > longest >= total_tokens]
    longer = [request for request in equal if request.expected_output_tokens > 2 * max(1, expected_tokens)]
    longer = [request for request in longer if request not in stranded]
    if book.config.max_queue > 1 and (lower or longer):
        oldest = min(lower + longer, key=_age)
        lower, longer = ([request for request in each if request is not oldest] for each in (lower, longer))
    return longer + stranded + lower


def _age(request: Request) -> tuple[float, int]:
    """Returns a sort key that puts whoever has waited longest first."""
    return request.waiting_since_s, request.number


def _fail_unmeetable(book: Book, now: float) -> None:
    """Fails queued requests that cannot meet their deadlines, unless some output was received: those may go on."""
    if not any(request.spec.deadline_s is not None for request in book.queue):
        return
    costs, line, everyone = _costs(book), _Line(book), book.workers.cluster.everyone
    for request in list(book.queue.in_order()):
        spec = request.spec
        if spec.deadline_s is not None and not request.output and not request.is_part:
            with book.isolated("tick", request, now):
                work = _work(book, spec.tenant, len(spec.token_ids), spec.min_tokens, request.max_tokens)
                error = _deadline_error(book, costs, spec, work, line.ahead(), now)
                if error is not None:
                    book.fail(request, error, now)
                    continue
        if could_serve(everyone, request):  # else it delays nobody
            line.add(request)


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
        request.unserved_since_s = request.loading_until_s = None
    elif _waits_for_loading(book, request, now):
        request.unserved_since_s = request.awaited_s = now
    elif request.unserved_since_s is None:
        request.unserved_since_s = now
    elif now - request.unserved_since_s >= config.no_worker_timeout_s:
        return NoWorker(why_unserved(book, request), retry_after_s=config.retry_after_s)
    if now - max(request.waiting_since_s, request.awaited_s) >= config.queue_timeout_s:
        return Overloaded("no room became free in time", retry_after_s=config.retry_after_s)
    return None


def _waits_for_loading(book: Book, request: Request, now: float) -> bool:
    """Returns whether a request that no ready worker could serve waits for one that loads (`loading.py`)."""
    expected_s = book.loading.expected_s(has_decoder=bool(book.workers.cluster.everyone.longest_sequence), now=now)
    if expected_s is None:
        return False
    if request.loading_until_s is None:
        request.loading_until_s = expected_s
    return now < request.loading_until_s


class _Line:
    """Sums up what is before a request whose deadline is in question."""

    def __init__(self, book: Book) -> None:
        """Begins with the requests between the queue and a decode worker."""
        self._book = book
        self._outlook = _outlook(book)
        self._num_sequences = book.num_in[Phase.PREFILLING] + book.num_in[Phase.PARKED]
        self._num_tokens = 0
        self._begun_tokens = self._num_sequences * self._outlook.prompt_tokens_each
        self._output_tokens = self._num_sequences * self._outlook.output_tokens_each

    def add(self, request: Request) -> None:
        """Adds a queued request."""
        num_tokens, num_answers = len(request.spec.token_ids) + len(request.output), len(request.answers)
        self._num_sequences += num_answers
        self._num_tokens += num_tokens
        self._output_tokens += num_answers * _tokens_to_come(self._book, request)

    def ahead(self) -> Ahead:
        return Ahead(
            self._num_tokens,
            self._num_sequences,
            self._begun_tokens + self._num_tokens,
            self._output_tokens,
            self._outlook.tokens_left,
        )


def _costs(book: Book) -> Costs:
    return Costs.of(book.workers.views(), book.config.split)


def _outlook(book: Book) -> Outlook:
    """Returns `Book.outlook`, found at the first question after a tick: it looks at each live request."""
    if book.outlook is None:
        if not len(book.output_lengths):
            book.longest_output = max(book.longest_output, *(len(one.output) for one in book.requests.values()), 0)
        book.outlook = _look_out(book)
    return book.outlook


def _look_out(book: Book) -> Outlook:
    if not len(book.queue) and not len(book.queue.parked) and not book.num_in[Phase.PREFILLING]:
        return Outlook()
    left: list[float] = []
    number, prompt_tokens, output_tokens = 0, 0, 0.0
    for request in book.requests.values():
        if request.phase is Phase.DECODING:
            left += [_tokens_to_come(book, request)] * len(request.open_answers)
        elif request.phase in (Phase.PREFILLING, Phase.PARKED):
            number += 1
            prompt_tokens += len(request.spec.token_ids) + len(request.output)
            output_tokens += len(request.answers) * _tokens_to_come(book, request)
    number = max(1, number)
    return Outlook(tuple(sorted(left)), prompt_tokens / number, output_tokens / number)


def _tokens_to_come(book: Book, request: Request) -> float:
    """Returns how many output tokens a request is still expected to get."""
    spec = request.spec
    expected = book.expected_output(spec.tenant, len(spec.token_ids), spec.min_tokens, request.max_tokens)
    return max(1.0, expected - len(request.output))


def _check_deadline(
    book: Book,
    spec: RequestSpec | ExpectedRequest,
    num_tokens: int,
    max_tokens: int,
    now: float,
    *,
    before_s: float = 0.0,
) -> None:
    if spec.deadline_s is None:
        return
    line = _Line(book)  # before the work: what is expected of outputs is looked up for it
    work = _work(book, spec.tenant, num_tokens, spec.min_tokens, max_tokens)
    order = order_of(spec.priority, int(work.output_tokens), sys.maxsize)
    everyone = book.workers.cluster.everyone
    for other in book.queue.before(spec, order, book.shares):
        if could_serve(everyone, other):  # else it delays nobody
            line.add(other)
    error = _deadline_error(book, _costs(book), spec, work, line.ahead(), now, before_s=before_s)
    if error is not None:
        raise error


def _deadline_error(
    book: Book,
    costs: Costs,
    spec: RequestSpec | ExpectedRequest,
    work: Work,
    ahead: Ahead,
    now: float,
    *,
    before_s: float = 0.0,
) -> BatonError | None:
    """Returns the error for a request that cannot meet its deadline, or None if it may try.

    It is refused if even the lower bounds of its time exceed what is left by `deadline_margin`, or if the cluster is
    crowded and the expected time is too long. `before_s` is the time until the request can be queued.
    """
    if spec.deadline_s is None:
        return None
    remaining_s = max(0.0, spec.deadline_s - now)
    forecast = costs.forecast(work, ahead, overtakes=spec.priority > 0, enough_s=remaining_s - before_s)
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


def _work(book: Book, caller: str, num_tokens: int, min_tokens: int, max_tokens: int) -> Work:
    """Returns a request's work, with the expected output."""
    expected_tokens = book.expected_output(caller, num_tokens, min_tokens, max_tokens)
    return Work(num_tokens, min(min_tokens, max_tokens), expected_tokens)
