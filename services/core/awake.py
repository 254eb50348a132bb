"""Computes *awake time*, which does not advance while this process was itself stopped, for deadlines of peers. Pure.

A process that was stopped (SIGSTOP, a paused container or machine) did not listen meanwhile, so the silence of its
peers does not show that they failed: they may have been stopped with it. Deadlines of peers are therefore kept in
awake time. A process that runs has no gaps, so it notices a silent peer as fast as with any other clock.

Owns: what counts as a gap. Never: what a deadline is for, or reading a clock (`timeouts`). Clients' deadlines and the
times in traces and metrics use the real clock.
"""

from __future__ import annotations

GAP_S = 0.5
"""Longest time, in seconds, that may count between two readings. A longer one counts as this much: the process was
stopped, or its event loop was blocked."""


class AwakeTime:
    """Computes awake time from the times at which it is read. Read it several times in each GAP_S; with fewer readings,
    time in which the process ran is taken for a stop."""

    def __init__(self) -> None:
        self._read_s: float | None = None
        self._missed_s = 0.0

    def at(self, now: float) -> float:
        """Returns `now`, in seconds, less the time during which this process cannot have heard anybody.

        The result does not go back while `now` does not. It advances by up to GAP_S even over a gap, so deadlines pass
        even in a process that is blocked again and again.
        """
        if self._read_s is not None:
            self._missed_s += max(0.0, now - self._read_s - GAP_S)
        self._read_s = now if self._read_s is None else max(self._read_s, now)
        return now - self._missed_s
