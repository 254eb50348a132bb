"""Decides when a tier that failed is used again. Pure.

Owns: the pauses. Never: what a failure is.
"""

from __future__ import annotations

_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0


class TierStanding:
    """Leaves a tier out after a failure, twice as long after each that follows, until it succeeds again."""

    def __init__(self) -> None:
        self.num_failures = 0
        self.why: str | None = None
        """Why the tier is left out or was when it was last used; None since its last success."""
        self._pause_s = 0.0
        self._until_s = float("-inf")

    def usable(self, now_s: float) -> bool:
        """Returns whether the tier may be used or tried again."""
        return now_s >= self._until_s

    def failed(self, why: str, now_s: float) -> bool:
        """Leaves the tier out for a while; returns whether it was in use before. What fails during a pause, because it
        had begun before, changes nothing."""
        self.num_failures += 1
        if not self.usable(now_s):
            return False
        first = self.why is None
        self.why = why
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s) or _FIRST_PAUSE_S
        self._until_s = now_s + self._pause_s
        return first

    def succeeded(self, now_s: float) -> bool:
        """Notes a success; returns whether the tier is back in use by that."""
        if self.why is None or not self.usable(now_s):
            return False
        self.why, self._pause_s = None, 0.0
        return True
