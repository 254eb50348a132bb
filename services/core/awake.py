"""Computes *awake time*, which does not advance while this process was itself stopped, and slowly while it waits for a
processor, for deadlines of peers. Pure.

A process that was stopped (SIGSTOP, a paused container or machine) did not listen meanwhile, so the silence of its
peers does not show that they failed: they may have been stopped with it. Deadlines of peers are therefore kept in
awake time. A process that runs has no gaps, so it notices a silent peer as fast as with any other clock. On a host with
too much to do, a process listens late, and its peers on the same host speak late: none of them is broken.

Owns: what counts as a gap. Never: what a deadline is for, or reading a clock (`timeouts`). Clients' deadlines and the
times in traces and metrics use the real clock.
"""

from __future__ import annotations

GAP_S = 0.5
"""Longest time, in seconds, that may count between two readings. A longer one counts as this much: the process was
stopped, or its event loop was blocked."""

_MOST_DELAYED = 0.75
"""Most of a time that counts as a wait for a processor. So a starved process judges its peers too, if up to four times
as late."""


class AwakeTime:
    """Computes awake time from the times at which it is read. Read it several times in each GAP_S; with fewer readings,
    time in which the process ran is taken for a stop."""

    def __init__(self) -> None:
        self._read_s: float | None = None
        self._owed_s = 0.0
        """Time that it has waited for a processor, and that is still to be taken off. What was read does not go
        back."""
        self.missed_s = 0.0
        """All that was taken off."""

    def delayed(self, seconds: float) -> None:
        """Notes that this process has waited for a processor for `seconds` since the last call. Call it at least once
        in each GAP_S."""
        self._owed_s = min(GAP_S, self._owed_s + seconds)

    def at(self, now: float) -> float:
        """Returns `now`, in seconds, less the time during which this process cannot have heard anybody.

        The result does not go back while `now` does not. It advances by up to GAP_S even over a gap, so deadlines pass
        even in a process that is blocked again and again.
        """
        if self._read_s is not None and now != self._read_s:  # a message's events have one time
            passed_s = max(0.0, now - self._read_s)
            delayed_s = min(self._owed_s, _MOST_DELAYED * min(passed_s, GAP_S))
            self._owed_s -= delayed_s
            self.missed_s += max(0.0, passed_s - GAP_S) + delayed_s
        self._read_s = now if self._read_s is None else max(self._read_s, now)
        return now - self.missed_s
