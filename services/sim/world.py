"""Keeps virtual time: what is to happen, in order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class World:
    """Runs calls at their times. Calls of the same time run in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(time_s, self.now), next(self._numbers), call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.at(self.now + delay_s, call)

    def step(self) -> bool:
        """Runs the next call. Returns False if there is none."""
        if not self._heap:
            return False
        self.now, _, call = heapq.heappop(self._heap)
        call()
        return True
