"""Defines the clocks that are injected: state machines take `now` as an argument; other code asks a `Clock`.

Owns: also the timeout of a block of code by such a clock. Never: what counts as awake (`awake`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from services.core.awake import AwakeTime


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


_TICK_S = 0.1
_LOOK_S = 0.4
"""Seconds between two looks for how long the process has waited for a processor. A look takes longer the more threads
the process has."""
SOONEST_S = 0.001
"""Shortest time, in seconds, before a deadline is checked again. Without it, a rounding error in the time that is left
could make the check repeat without a pause."""


class AwakeClock:
    """Gives the awake time of another `Clock`. On the event loop that uses it, `tick_forever` must run, or `tick` be
    called every 0.1 s."""

    def __init__(self, clock: Clock, run_delay: Callable[[], float] | None = None) -> None:
        """`run_delay` returns the seconds for which this process has waited for a processor since the last call
        (`core.run_delay`); None for no look."""
        self._clock = clock
        self._time = AwakeTime()
        self._run_delay = run_delay
        self._looked_s = clock.now()

    def now(self) -> float:
        return self._time.at(self._clock.now())

    def missed_s(self) -> float:
        """Returns the seconds that this clock has not counted so far."""
        self.now()
        return self._time.missed_s

    def tick(self) -> float:
        """Reads the clock, and now and then how long this process has waited for a processor. Returns that."""
        now, delayed_s = self._clock.now(), 0.0
        if self._run_delay is not None and now - self._looked_s >= _LOOK_S:
            self._looked_s, delayed_s = now, self._run_delay()
            self._time.delayed(delayed_s)
        self.now()
        return delayed_s

    async def tick_forever(self) -> None:
        """Reads the clock often enough that only a real stop counts as a gap. Runs until it is cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(_TICK_S)


@contextlib.asynccontextmanager
async def timeout_after(seconds: float, clock: Clock) -> AsyncIterator[None]:
    """Bounds a block as `asyncio.timeout` does, by `clock`. Raises TimeoutError if the block takes longer."""
    async with asyncio.timeout(None) as timeout:
        deadline_timer = _DeadlineTimer(timeout, clock, seconds)
        try:
            yield
        finally:
            deadline_timer.stop()


class _DeadlineTimer:
    """Ends a timeout when `clock` reaches the deadline, and else sets itself again.

    It is an object because a closure that sets itself again refers to itself: it would keep the task, and all that a
    cancelled task refers to, until a garbage collection.
    """

    def __init__(self, timeout: asyncio.Timeout, clock: Clock, seconds: float) -> None:
        self._timeout = timeout
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._deadline_s = clock.now() + seconds
        self._timer = self._loop.call_later(seconds, self._check)

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        left_s = self._deadline_s - self._clock.now()
        if left_s > 0:
            self._timer = self._loop.call_later(max(left_s, SOONEST_S), self._check)
        else:
            self._timeout.reschedule(self._loop.time())
