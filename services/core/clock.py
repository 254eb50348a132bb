"""Defines the clocks that are injected: state machines take `now` as an argument; other code asks a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Returns seconds since an arbitrary origin; they never go back."""
        ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


def _epoch_offset_ns() -> int:
    """Returns Unix time minus monotonic time, in nanoseconds.

    Of several readings it takes the one during which the process was interrupted least: a process that loses the
    processor between the two clocks would be wrong by that time, and with it all its spans.
    """
    readings = []
    for _ in range(16):
        before, unix, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, unix - (before + after) // 2))
    return min(readings)[1]


# One offset per process, so that spans built from monotonic stamps keep their order and line up across processes.
_EPOCH_OFFSET_NS = _epoch_offset_ns()


def epoch_ns(monotonic_s: float) -> int:
    """Returns the Unix time, in nanoseconds, of a reading of `MonotonicClock` in seconds."""
    return int(monotonic_s * 1e9) + _EPOCH_OFFSET_NS


class ManualClock:
    """Gives a time that moves only when it is told to, for tests and the simulator."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> float:
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now_s += seconds
        return self._now_s
