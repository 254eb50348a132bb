"""Logs one line at intervals about what this process does, as long as it does anything.

Owns: when a line is due and the time span its rates cover. Never: what the figures are (services read their own).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from services.core.clock import Clock

log = logging.getLogger(__name__)

Figures = TypeVar("Figures")
"""What one line reports, at one moment: counts that only grow, and states. Equal figures mean that nothing happened."""


class ActivityLog(Generic[Figures]):
    """Writes the periodic activity line of a process.

    `run` calls `look` every `interval_s` on the event loop. `say` gets the figures before and now, and the seconds
    between, and writes the line.
    """

    def __init__(
        self,
        read: Callable[[], Figures],
        say: Callable[[Figures, Figures, float], None],
        clock: Clock,
        interval_s: float,
    ) -> None:
        self._read, self._say, self._clock = read, say, clock
        self._interval_s = interval_s
        self._before, self._at_s = read(), clock.now()
        self._was_busy = False

    def look(self) -> None:
        """Writes a line if anything changed since the last look, and one more after that, which shows it at rest."""
        before, seconds = self._before, self._clock.now() - self._at_s
        self._before, self._at_s = self._read(), self._clock.now()
        busy = self._before != before
        if (busy or self._was_busy) and seconds > 0:
            self._say(before, self._before, seconds)
        self._was_busy = busy

    async def run(self) -> None:
        """Calls `look` at every interval until it is cancelled. A line that fails is logged and has no other effect."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                self.look()
            except Exception:
                log.exception("the line about this process's activity failed")
