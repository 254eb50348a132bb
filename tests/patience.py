"""How long a test waits for what must happen within a time: as long as promised where the machine has nothing else to
do, and longer where others use it, by as much as they slow it down. Never: measures the thing itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

_WORK_S = 0.1
_BUSY = 1.2
"""Wall time over CPU time beyond which others are at work."""
_MARGIN = 3.0
"""What is waited for takes several processes, each of which waits its turn."""
_MOST = 20.0


class Patience:
    """Begins when it is made."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began_s = time.monotonic()
        self._limit_s = seconds

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began_s

    def is_over(self) -> bool:
        if self.waited_s <= self._limit_s:
            return False
        slow = slowness()
        self._limit_s = self.seconds * min(_MOST, slow * _MARGIN if slow > _BUSY else 1.0)
        return self.waited_s > self._limit_s


def slowness() -> float:
    """Wall time over CPU time of a little work: 1 on a machine with a core to spare. Takes that little while."""
    began_s, worked_s = time.monotonic(), time.thread_time()
    while time.thread_time() - worked_s < _WORK_S:
        pass
    return (time.monotonic() - began_s) / _WORK_S


async def all_done(tasks: Iterable[asyncio.Task[Any]], seconds: float) -> None:
    """Waits for all, whatever becomes of them."""
    patience, pending = Patience(seconds), set(tasks)
    while pending:
        assert not patience.is_over(), f"{len(pending)} not done after {patience.waited_s:.0f} s"
        _, pending = await asyncio.wait(pending, timeout=1.0)
