"""How a worker leaves: it takes nothing new, finishes what it has, and is gone when its time is up at the latest.

Owns: whether it is to leave, and until when. Never: what there is to finish (WorkerHost), what makes it leave (a
signal in `main`, a router in its session), or how the process ends (`main`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Departure:
    """Made on the event loop. Asked for as often as anyone likes: the shortest time counts."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._changed = asyncio.Event()
        self._deadline_s = math.inf

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def ask(self, within_s: float) -> None:
        self._deadline_s = min(self._deadline_s, asyncio.get_running_loop().time() + max(0.0, within_s))
        self._asked.set()
        self._changed.set()

    def leg_over(self) -> None:
        """There may be nothing left to finish."""
        self._changed.set()

    async def complete(self, num_legs: Callable[[], int]) -> int:
        """Waits until it is asked for, and then until no leg is left or the time is up; how many are given up."""
        await self._asked.wait()
        while left := num_legs():
            if asyncio.get_running_loop().time() >= self._deadline_s:
                return left
            self._changed.clear()
            try:
                async with asyncio.timeout_at(self._deadline_s):
                    await self._changed.wait()
            except TimeoutError:
                continue  # unless the last leg ended in that moment, the time is up
        return 0
