"""Keeps times at which to look at something. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Container
from typing import Generic, TypeVar

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
