"""Computes how long a test waits for what must happen within a time: as long as promised on an idle machine of today,
and longer on one that is slow or used by others, by as much as that slows it down, but never so long that it would
prove nothing. Where steps, snapshots or messages can be counted instead of seconds, a test counts those
(`RealCluster.idle`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

HANG_S = 60.0
"""After this, a test that waits for what must happen is taken to hang. It says nothing of how fast that is."""


class Wrong(AssertionError):
    """Says that something was wrong for which a busy machine cannot be the reason: such a test is never tried again."""


_WORK = 1_000_000
"""Additions."""
_NOMINAL_S = 0.08
"""What they take on an idle server CPU, at most: 0.045 s at 3 GHz. A machine may be slow because others use it, or by
itself."""
_BUSY = 1.2
"""Slowness that is none yet."""
_MARGIN = 2.0
"""What is waited for takes several processes, each of which waits its turn."""
_MOST = 4.0
"""A limit of 2 s must not become one that any timeout of the system under test would meet too."""


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
        self._limit_s = patient(self.seconds)
        return self.waited_s > self._limit_s


def patient(seconds: float) -> float:
    """Returns how long something may take now that is promised within `seconds` on an idle machine."""
    slow = slowness()
    return seconds * min(_MOST, slow * _MARGIN if slow > _BUSY else 1.0)


def slowness() -> float:
    """Returns how many times as long a little work takes as on an idle machine of today: from 1 to 4."""
    began_s, total = time.monotonic(), 0
    for number in range(_WORK):
        total += number
    return min(_MOST, max(1.0, (time.monotonic() - began_s) / _NOMINAL_S))


async def all_done(tasks: Iterable[asyncio.Task[Any]], seconds: float) -> None:
    """Waits for all, whatever becomes of them."""
    patience, pending = Patience(seconds), set(tasks)
    while pending:
        assert not patience.is_over(), f"{len(pending)} not done after {patience.waited_s:.0f} s"
        _, pending = await asyncio.wait(pending, timeout=1.0)
