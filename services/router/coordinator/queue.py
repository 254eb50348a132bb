"""Says who is next of all that waits, and which workers are kept for whom. Pure.

The rule: what waits is in one order, and each is placed where those before it leave room. First comes

1. a handoff before a request of the queue, since it holds blocks that the queue may wait for;
2. of the queue, the request of the tenant that was served least for its weight (`policy/shares.py`); of the handoffs,
   those that began when their tenants had been served less than others;
3. whoever has waited `aging_s`, the longest first: of the handoffs all of these, of a tenant's requests with one start
   in `turn_every`, for which the priorities take turns. If all of them went first, a flood of low priority would delay
   high ones as if there were no priorities (docs/adr/0017);
4. the higher priority;
5. of the queue, the shorter expected output, by powers of two: a handoff's worker keeps room for the oldest;
6. whoever came first.

Whatever has waited `overtake_limit_s` is *aged*. If it finds no room, it claims the worker that is nearest to having
room for it, and nobody who comes after it is placed there: the room only grows until the claimant starts. The rest goes
on elsewhere. There is one exception (`kept_from`): a handoff may come after a claimant of the queue and yet hold blocks
that the claimant waits for.

Workers have queues of their own, and begin higher priorities first. Where a prompt has waited `aging_s`, a worker is
sent `turn_every` - 1 more prompts of higher priority until it has begun that one.

Owns: what waits, its order, who has waited long, claims. Never: where something runs (`placement.py`), or what a tenant
was served.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.events import ExpectedRequest, RequestSpec
from services.router.coordinator.request import Phase, Request
from services.router.coordinator.workers import Worker, WorkerTable
from services.router.policy import Share, Shares, WorkerSubset

Order = tuple[int, int, int]
Walk = Iterator[Request]


def order_of(priority: int, expected_output_tokens: int, number: int) -> Order:
    """Returns a request's sort key where it waits: a higher priority comes first; among equals a shorter expected
    output, unless the longer is less than twice as long or so; and then an earlier arrival."""
    return (-priority, expected_output_tokens.bit_length(), number)


def line_order(request: Request) -> Order:
    """Returns the sort key among a tenant's requests in the queue: one that has output, whose client waits for the next
    token, comes before its equals. It does not change while the request is there."""
    expected_tokens = 0 if request.output or request.is_part else request.expected_output_tokens
    return order_of(request.spec.priority, expected_tokens, request.number)


def handoff_order(request: Request) -> Order:
    """Returns the sort key of handoffs and of claims. It does not change while a handoff waits."""
    return order_of(request.spec.worker_priority(goes_ahead=request.goes_ahead), 0, request.number)


class WaitList:
    """Keeps requests in an order that does not change while they are in it."""

    def __init__(self, order: Callable[[Request], Order]) -> None:
        self.order = order
        self._ordered: list[tuple[Order, Request]] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Request]:
        """Walks over a copy, so that requests may leave the list meanwhile."""
        return iter([request for _, request in self._ordered])

    def up_to(self, order: Order) -> list[Request]:
        """Returns the requests that come before one of that order."""
        return [request for _, request in self._ordered[: bisect.bisect_left(self._ordered, order, key=_order)]]

    def add(self, request: Request) -> None:
        bisect.insort(self._ordered, (self.order(request), request), key=_order)

    def remove(self, request: Request) -> None:
        index = bisect.bisect_left(self._ordered, self.order(request), key=_order)
        assert self._ordered[index][1] is request
        del self._ordered[index]

    def discard(self, request: Request) -> bool:
        """Removes the request wherever it is in the list. Returns whether it was there."""
        before = len(self._ordered)
        self._ordered = [entry for entry in self._ordered if entry[1] is not request]
        return len(self._ordered) < before


def _order(entry: tuple[Order, Request]) -> Order:
    return entry[0]


class TenantLine(WaitList):
    """Keeps what waits of one tenant, and whose turn it is of those that have waited long."""

    def __init__(self, share: Share) -> None:
        super().__init__(line_order)
        self.share = share
        self.num_starts = 0
        """Requests that were started since the last turn."""
        self._num_turns = 0
        self._last_turn: dict[int, int] = {}
        """The number of the last turn of each priority."""

    def turn_order(self, request: Request) -> tuple[int, float, int]:
        """Returns the sort key of those that wait for a turn: the priorities one after the other, and in each whoever
        has waited longest."""
        return self._last_turn.get(request.spec.priority, 0), request.waiting_since_s, request.number

    def turn_taken(self, priority: int) -> None:
        """Notes that a request of this priority had its turn."""
        self.num_starts = 0
        self._num_turns += 1
        self._last_turn[priority] = self._num_turns

    def starting_by(self, start: float) -> list[Request]:
        """Returns the requests that begin before the tenant's counter is above `start`, if nobody is in the way."""
        found, num_tokens = [], 0
        for request in self:
            if self.share.start_after(num_tokens) > start:
                break
            found.append(request)
            num_tokens += len(request.spec.token_ids)
        return found


class Queue:
    """Keeps requests without a worker, in a line for each tenant, and the parked handoffs; its length is the
    number of the former. A pass over all that waits is `begin_pass`, `handoffs`, `starts`, in that order."""

    def __init__(self, config: CoordinatorConfig, workers: WorkerTable) -> None:
        self.parked = WaitList(handoff_order)
        """The handoffs."""
        self.claims: dict[str, Request] = {}
        """The workers that aged requests of the queue have claimed, with the claimant. Those of the last pass hold
        until `starts` makes them anew."""
        self.for_handoffs: dict[str, Request] = {}
        """The workers that aged handoffs have claimed in this pass, or were offered to and have not answered yet."""
        self._config, self._workers = config, workers
        self._lines: dict[Share, TenantLine] = {}
        """None is empty."""
        self._number = 0
        self._claimed: frozenset[str] = frozenset()
        """Those of `claims` that were made in this pass."""
        self._overtaken: dict[str, int] = {}
        """Workers where a prompt was overtaken as often as it may be, with the highest such priority: no higher one is
        sent there."""

    # What waits

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Request]:
        """Walks over a copy, one line after the other."""
        return iter([request for line in self.lines() for request in line])

    def lines(self) -> list[TenantLine]:
        return list(self._lines.values())

    def add(self, request: Request) -> bool:
        """Returns whether it is the only one of its tenant that waits."""
        is_first = request.share not in self._lines
        self._lines.setdefault(request.share, TenantLine(request.share)).add(request)
        self._number += 1
        return is_first

    def remove(self, request: Request) -> None:
        line = self._lines[request.share]
        line.remove(request)
        self._removed(request, line)

    def discard(self, request: Request) -> None:
        """Removes the request if it is here, wherever that is."""
        self.parked.discard(request)
        line = self._lines.get(request.share)
        if line is not None and line.discard(request):
            self._removed(request, line)

    def _removed(self, request: Request, line: TenantLine) -> None:
        self._number -= 1
        if not len(line):
            del self._lines[request.share]

    def before(self, spec: RequestSpec | ExpectedRequest, order: Order, shares: Shares) -> list[Request]:
        """Returns the requests that would begin before one that came now, of `order` among its tenant's."""
        share = shares.get(spec.tenant) or Share(spec.tenant, spec.weight, shares)
        mine = self._lines.get(share)
        before = [] if mine is None else mine.up_to(order)
        num_tokens = sum(len(request.spec.token_ids) for request in before)
        start = share.lifted if mine is None else share.start_after(num_tokens)
        return before + [each for line in self.lines() if line is not mine for each in line.starting_by(start)]

    # Who is next

    def in_order(self, each: Callable[[TenantLine], Walk] = iter) -> Walk:
        """Yields the queue, the next to be served first: each time one of whoever was served least for its weight, and
        of each line what `each` yields of it.

        What is yielded may be started before the next is asked for. One that is not counts as if it had been served, so
        that other tenants' are looked at too.
        """
        if len(self._lines) == 1:
            yield from each(self.lines()[0])  # nobody else is there
            return
        heap = [(line.share.served, number, line) for number, line in enumerate(self.lines())]
        heapq.heapify(heap)
        walks: dict[TenantLine, Walk] = {}
        num_passed: Counter[TenantLine] = Counter()
        """Tokens of each line's prompts that were yielded and not started."""
        while heap:
            _, number, line = heap[0]
            walk = walks.get(line) or walks.setdefault(line, each(line))
            if (request := next(walk, None)) is None:
                heapq.heappop(heap)
                continue
            yield request
            if request.phase is Phase.QUEUED:
                num_passed[line] += len(request.spec.token_ids)
            heapq.heapreplace(heap, (line.share.start_after(num_passed[line]), number, line))

    def has_waited_long(self, request: Request, now: float) -> bool:
        return now - request.waiting_since_s >= self._config.aging_s

    def is_aged(self, request: Request, now: float) -> bool:
        """Returns whether the request has waited longer than others may overtake it."""
        return now - request.waiting_since_s >= self._config.overtake_limit_s

    def is_news(self, worker_id: str, now: float) -> bool:
        """Returns whether a new snapshot of the worker may place a handoff even if it shows no more room.

        The worker has refused the handoff, and after a new snapshot it is asked again. Or the handoff is aged: it is
        offered to the worker nearest to having room, and which one that is changes with every snapshot.
        """
        return any(worker_id in request.setbacks.refusals or self.is_aged(request, now) for request in self.parked)

    def begin_pass(self) -> bool:
        """Begins a pass over all that waits. Returns whether anything does."""
        self.claims = {name: claimant for name, claimant in self.claims.items() if claimant.phase is Phase.QUEUED}
        # Until it has room for that one it refuses younger ones: to offer it all that wait, one after the other, would
        # ask as many questions at each of its snapshots.
        self.for_handoffs = {
            name: claimant for name, claimant in self.for_handoffs.items() if _is_asked(name, claimant)
        }
        return bool(len(self.parked) or self._number)

    def handoffs(self, now: float) -> Walk:
        """Yields the handoffs in order. Each is to be placed, or not, before the next is asked for."""

        def turn(request: Request) -> tuple[bool, bool, float]:
            has_waited = self.has_waited_long(request, now)
            return not request.goes_ahead, not has_waited, request.waiting_since_s if has_waited else 0.0

        for request in sorted(self.parked, key=turn):
            if request.phase is Phase.PARKED:  # else a defect has ended it, with another part of the same request
                yield request

    def starts(self, now: float) -> Walk:
        """Yields the queue in order, without those that are not to be placed now and hold up nobody. Each is to be
        started, or not, before the next is asked for."""
        self.claims, self._claimed = {}, frozenset()
        self._overtaken = self._still_overtaken()
        for request in self.in_order(lambda line: self._in_turn(line, now)):
            if not self._passes_over(request, now):
                yield request

    def _in_turn(self, line: TenantLine, now: float) -> Walk:
        """Yields one tenant's requests in order, but one that has waited long when the next start is that one's
        turn."""
        first: Request | None = None
        waiting: Sequence[Request] | None = None  # those that may have a turn; most passes have none
        for request in line:
            is_turn = line.num_starts >= self._config.turn_every - 1
            if is_turn and waiting != [] and (first is None or first.phase is not Phase.QUEUED):
                if waiting is None:
                    waiting = [each for each in line if self.has_waited_long(each, now)]
                waiting = [each for each in waiting if each.phase is Phase.QUEUED and not self._passes_over(each, now)]
                first = min(waiting, key=line.turn_order, default=None)
                if first is not None:
                    yield first
                    if first.phase is not Phase.QUEUED:  # else it has found no room, and the turn stays its own
                        line.turn_taken(first.spec.priority)
            if request is not first and request.phase is Phase.QUEUED:
                yield request
                line.num_starts += request.phase is not Phase.QUEUED

    def _passes_over(self, request: Request, now: float) -> bool:
        """Returns whether it pauses, or no worker that is left could serve it even if all were idle."""
        if now < request.setbacks.not_before_s:
            return True
        left, num_tokens = self.left_to(request), len(request.spec.token_ids)
        if not could_serve(left, request):
            return True
        # Every worker that could prefill it is claimed.
        return left.longest_prompt <= num_tokens < self._workers.cluster.everyone.longest_prompt

    # Claims

    def claim(self, worker_id: str, request: Request) -> None:
        """Keeps the worker for what is aged."""
        if request.phase is Phase.PARKED:
            self.for_handoffs[worker_id] = request
            return
        self.claims[worker_id] = request
        self._claimed = frozenset(self.claims)

    def left_to(self, request: Request) -> WorkerSubset:
        """Returns the workers that nobody in the queue before the request has claimed, and where it would not overtake
        too often."""
        barred = self._claimed
        if self._overtaken:
            mine = request.spec.worker_priority(goes_ahead=request.share.is_behind)
            barred |= {worker_id for worker_id, priority in self._overtaken.items() if priority < mine}
        return self._workers.cluster.without(barred)

    def kept_from(self, handoff: Request, source_id: str, able: Collection[str]) -> list[set[str]]:
        """Returns the sets of claimed workers that a handoff may be kept off, one after the other until it finds room;
        `able` are those that could take it over.

        Adoption in place takes no room from the claimant of the worker, and its end may make that room. The handoff
        avoids the workers that requests of the queue have claimed that come before it, if any other is able. But if its
        source is claimed by one too, all workers are allowed in the end: the claimant waits for the blocks that the
        handoff holds there, and each of the two would wait for the other.
        """
        order, by_handoffs = handoff_order(handoff), self.for_handoffs.keys() - {source_id}
        older = {worker_id for worker_id, claimant in self.claims.items() if handoff_order(claimant) < order}
        claimed = by_handoffs | older
        if claimed.issuperset(able):
            return [by_handoffs]
        return [claimed, by_handoffs] if source_id in older else [claimed]

    # At workers

    def note_sent(self, worker: Worker, priority: int, now: float) -> None:
        """Counts a prompt that is sent to the worker, against those that have waited long there and that it will
        overtake."""
        for waiting in worker.predictions.values():
            if waiting.priority is None or waiting.priority >= priority or now - waiting.sent_s < self._config.aging_s:
                continue
            waiting.num_overtaking += 1
            if waiting.num_overtaking >= self._config.turn_every - 1:
                worker_id = worker.info.worker_id
                self._overtaken[worker_id] = max(waiting.priority, self._overtaken.get(worker_id, waiting.priority))

    def _still_overtaken(self) -> dict[str, int]:
        """Returns those of `_overtaken` where the worker has not begun the prompt yet."""
        found = dict[str, int]()
        for worker_id in self._overtaken:
            for each in self._workers.get(worker_id).predictions.values() if worker_id in self._workers else ():
                if each.priority is not None and each.num_overtaking >= self._config.turn_every - 1:
                    found[worker_id] = max(each.priority, found.get(worker_id, each.priority))
        return found


def could_serve(workers: WorkerSubset, request: Request) -> bool:
    """Returns whether one of the workers could serve a request of the queue if all were idle.

    Mostly it only compares two numbers, since the queue may have a thousand such requests. What has begun, or was
    refused by an engine, may also be bound to workers that are not there.
    """
    if request.total_tokens > workers.longest_sequence:
        return False
    is_free = not (request.has_begun or request.setbacks.unserved_by)
    return is_free or workers.fit(request.next_job()).can_begin


def _is_asked(worker_id: str, request: Request) -> bool:
    """Returns whether the worker is asked to take the request, and has not answered."""
    is_there = request.decode is not None and request.decode.worker.worker_id == worker_id
    return is_there and request.phase is Phase.BINDING
