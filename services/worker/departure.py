"""Lets a worker leave: it takes nothing new, finishes the legs it has, and stops at its deadline at the latest.

Owns: whether the worker is to leave, and until when. Never: what there is to finish (WorkerHost), what makes it leave
(a signal in `main`, a router in its session), or how the process ends (`main`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from services.core.config import DAY_S


class Departure:
    """Keeps the state of a worker's departure. It may be asked for any number of times: the earliest deadline counts.

    Make it on the event loop.
    """

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._changed = asyncio.Event()
        self._deadline_s = math.inf

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def ask(self, within_s: float) -> None:
        self._deadline_s = min(self._deadline_s, asyncio.get_running_loop().time() + min(max(0.0, within_s), DAY_S))
        self._asked.set()
        self._changed.set()

    def leg_over(self) -> None:
        """Notes that a leg ended: there may be nothing left to finish."""
        self._changed.set()

    async def complete(self, num_legs: Callable[[], int]) -> int:
        """Waits until the departure is asked for, and then until no leg is left or the deadline.

        Returns the number of legs left.
        """
        await self._asked.wait()
        while left := num_legs():
            if asyncio.get_running_loop().time() >= self._deadline_s:
                return left
            self._changed.clear()
            try:
                async with asyncio.timeout_at(self._deadline_s):
                    await self._changed.wait()
            except TimeoutError:
                continue  # the deadline has passed, unless the last leg ended in that moment
        return 0
