"""Keeps what waits: requests in the order in which they are served, and times at which to look at something. Pure.

Owns: the order of both; in the queue, that of one tenant's requests, and which tenant's is next. Never: why something
waits, or what is done about it, nor what a tenant was served (`policy/shares.py`).
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import Generic, TypeVar

from services.router.coordinator.request import Order, Phase, Request
from services.router.policy import Share


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


class Turns:
    """Counts which of a tenant's requests have had turns: the priorities one after the other, and in each whoever has
    waited longest."""

    def __init__(self) -> None:
        self.num_starts = 0
        """Requests that were started since the last turn."""
        self._num_turns = 0
        self._last: dict[int, int] = {}
        """The number of the last turn of each priority."""

    def order(self, request: Request) -> tuple[int, float, int]:
        """Returns the sort key of those that wait for a turn."""
        return self._last.get(request.spec.priority, 0), request.waiting_since_s, request.number

    def taken(self, priority: int) -> None:
        """Notes that a request of this priority had its turn."""
        self.num_starts = 0
        self._num_turns += 1
        self._last[priority] = self._num_turns


class TenantLine(WaitList):
    """Keeps what waits of one tenant for one model: by priority, expected length and arrival."""

    def __init__(self, share: Share, turns: Turns) -> None:
        super().__init__(lambda request: request.queue_order)
        self.share = share
        self.turns = turns

    def starting_by(self, start: float) -> list[Request]:
        """Returns the requests that begin before the tenant's counter is above `start`, if nobody is in the way."""
        found, num_tokens = [], 0
        for request in self:
            if self.share.start_after(num_tokens) > start:
                break
            found.append(request)
            num_tokens += len(request.spec.token_ids)
        return found


class FairQueue:
    """Keeps the queue: a line for each tenant and model. Of the lines of a model the next request is that of the tenant
    that was served least for its weight; models, which share no worker, take turns."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[Share, TenantLine]] = {}
        """By model. None is empty."""
        self._turns: dict[Share, Turns] = {}
        self._number = 0

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Request]:
        """Walks over a copy, one line after the other."""
        return iter([request for line in self.lines() for request in line])

    def lines(self) -> list[TenantLine]:
        return [line for lines in self._lines.values() for line in lines.values()]

    def lines_of(self, model: str) -> list[TenantLine]:
        return list(self._lines.get(model, {}).values())

    def waits(self, model: str, share: Share) -> bool:
        """Returns whether anything of that tenant waits for the model."""
        return share in self._lines.get(model, {})

    def _line_of(self, request: Request) -> TenantLine | None:
        return self._lines.get(request.spec.model, {}).get(request.share)

    def add(self, request: Request) -> bool:
        """Returns whether it is the only one of its tenant that waits for its model."""
        lines = self._lines.setdefault(request.spec.model, {})
        line = lines.get(request.share)
        if is_first := line is None:
            line = lines[request.share] = TenantLine(request.share, self._turns.setdefault(request.share, Turns()))
        line.add(request)
        self._number += 1
        return is_first

    def remove(self, request: Request) -> None:
        line = self._line_of(request)
        assert line is not None
        line.remove(request)
        self._removed(request, line)

    def discard(self, request: Request) -> None:
        """Removes the request if it is here, wherever in its line that is."""
        line = self._line_of(request)
        if line is not None and line.discard(request):
            self._removed(request, line)

    def _removed(self, request: Request, line: TenantLine) -> None:
        self._number -= 1
        if not len(line):
            lines = self._lines[request.spec.model]
            del lines[request.share]
            if not lines:
                del self._lines[request.spec.model]

    def forget(self, share: Share) -> None:
        """Forgets the turns of a tenant of which nothing waits."""
        self._turns.pop(share, None)

    def in_order(self, each: Callable[[TenantLine], Iterator[Request]] = iter) -> Iterator[Request]:
        """Yields what waits, the next to be served first; of each line what `each` yields of it.

        What is yielded may be started before the next is asked for. One that is not counts as if it had been served, so
        that other tenants' are looked at too.
        """
        if len(self._lines) == 1 and len(lines := next(iter(self._lines.values()))) == 1:
            yield from each(next(iter(lines.values())))  # nobody else is there
            return
        rounds = [_in_shares(list(lines.values()), each) for lines in self._lines.values()]
        while rounds:
            for one in list(rounds):
                if (request := next(one, None)) is not None:
                    yield request
                else:
                    rounds.remove(one)


def _in_shares(lines: list[TenantLine], each: Callable[[TenantLine], Iterator[Request]]) -> Iterator[Request]:
    """Yields the requests of several tenants, each time one of whoever was served least for its weight."""
    heap = [(line.share.served, number, line) for number, line in enumerate(lines)]
    heapq.heapify(heap)
    walks: dict[TenantLine, Iterator[Request]] = {}
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


def _order(entry: tuple[Order, Request]) -> Order:
    return entry[0]


Key = TypeVar("Key", int, str)


class Alarms(Generic[Key]):
    """Keeps the times at which keys are due; a key may have several alarms."""

    def __init__(self, live: Container[Key]) -> None:
        """`live` holds the keys that still exist. Alarms of other keys are dropped before they outnumber the rest."""
        self._live: Container[Key] = live
        self._heap: list[tuple[float, Key]] = []
        self._most = 0

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, at_s: float, key: Key) -> None:
        heapq.heappush(self._heap, (at_s, key))
        if len(self._heap) > self._most:
            self._heap = [alarm for alarm in self._heap if alarm[1] in self._live]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + 64

    def due(self, now: float) -> list[Key]:
        """Returns the keys whose alarms have rung, in order of time. Each alarm is returned once."""
        keys: dict[Key, None] = {}
        while self._heap and self._heap[0][0] <= now:
            keys[heapq.heappop(self._heap)[1]] = None
        return [key for key in keys if key in self._live]
