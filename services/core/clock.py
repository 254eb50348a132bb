"""Time, injected. Pure code takes `now` as an argument; shells ask a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, monotonic, from an arbitrary origin."""
        ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


def _epoch_offset_ns() -> int:
    """Unix time less monotonic time: of several readings the one during which the process was interrupted least. One
    that loses the processor between the two clocks would be wrong by as long, and with it all spans of this process."""
    readings = []
    for _ in range(16):
        before, unix, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, unix - (before + after) // 2))
    return min(readings)[1]


# One offset per process, so that spans built from monotonic stamps keep their order and line up across processes.
_EPOCH_OFFSET_NS = _epoch_offset_ns()


def epoch_ns(monotonic_s: float) -> int:
    """Unix time in nanoseconds of a `MonotonicClock` stamp."""
    return int(monotonic_s * 1e9) + _EPOCH_OFFSET_NS


class ManualClock:
    """For tests and the simulator: moves only when told."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> float:
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now_s += seconds
        return self._now_s
