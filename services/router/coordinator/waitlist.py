"""Requests that wait for a worker, in the order in which they are served. Pure.

Used for the queue (no leg) and for parked handoffs. Bounds are the caller's.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from services.router.coordinator.requests import Request


class WaitList:
    def __init__(self) -> None:
        self._ordered: list[tuple[tuple[int, int], Request]] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Request]:
        """A snapshot: requests may leave while it is walked."""
        return iter([request for _, request in self._ordered])

    def add(self, request: Request) -> None:
        bisect.insort(self._ordered, (request.order, request), key=_order)

    def remove(self, request: Request) -> None:
        index = bisect.bisect_left(self._ordered, request.order, key=_order)
        assert self._ordered[index][1] is request
        del self._ordered[index]

    def discard(self, request: Request) -> None:
        """Wherever it is, if it is there at all."""
        self._ordered = [entry for entry in self._ordered if entry[1] is not request]


def _order(entry: tuple[tuple[int, int], Request]) -> tuple[int, int]:
    return entry[0]
