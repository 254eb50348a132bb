"""Keeps what waits: requests in the order in which they are served, and times at which to look at something. Pure.

Owns: the order of both. Never: why something waits, or what is done about it.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Container, Iterator
from typing import Generic, TypeVar

from services.router.coordinator.request import Request


class WaitList:
    """Keeps requests by priority, then by arrival (`Request.order`)."""

    def __init__(self) -> None:
        self._ordered: list[tuple[tuple[int, int], Request]] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Request]:
        """Walks over a copy, so that requests may leave the list meanwhile."""
        return iter([request for _, request in self._ordered])

    def add(self, request: Request) -> None:
        bisect.insort(self._ordered, (request.order, request), key=_order)

    def remove(self, request: Request) -> None:
        index = bisect.bisect_left(self._ordered, request.order, key=_order)
        assert self._ordered[index][1] is request
        del self._ordered[index]

    def discard(self, request: Request) -> None:
        """Removes the request if it is in the list, wherever that is."""
        self._ordered = [entry for entry in self._ordered if entry[1] is not request]


def _order(entry: tuple[tuple[int, int], Request]) -> tuple[int, int]:
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
