"""Keeps what waits: requests in the order in which they are served, and times at which to look at something. Pure.

Owns: the order of both. Never: why something waits, or what is done about it.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Container, Iterator
from typing import Generic, TypeVar

from services.router.coordinator.request import Order, Request


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

    def discard(self, request: Request) -> None:
        """Removes the request if it is in the list, wherever that is."""
        self._ordered = [entry for entry in self._ordered if entry[1] is not request]


class Turns:
    """Counts who has had turns: the priorities one after the other, and in each whoever has waited longest."""

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
