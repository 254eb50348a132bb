"""Limits a rate by a token bucket. Pure."""

from __future__ import annotations

_HARDLY_ANY = 1e-6
"""So much less than what is asked for is rounding."""


class TokenBucket:
    """Fills at a rate up to its burst. Units are taken from it, and given back.

    Of a clock that jumps back it takes the new time and fills by nothing, so a jump neither grants units nor stops the
    filling until the old time is reached again.
    """

    __slots__ = ("_at_s", "_level", "burst", "rate_per_s")

    def __init__(self, rate_per_s: float, burst: float, now: float) -> None:
        """It is full at first. Both numbers are positive."""
        self.rate_per_s = rate_per_s
        self.burst = burst
        self._level = float(burst)
        self._at_s = now

    def level(self, now: float) -> float:
        """Returns how many units are there; fewer than none if more were used than had been taken."""
        elapsed_s, self._at_s = max(0.0, now - self._at_s), now
        self._level = min(self.burst, self._level + elapsed_s * self.rate_per_s)
        return self._level

    def wait_s(self, units: float, now: float) -> float:
        """Returns in how many seconds the units are there, if nobody takes any; 0 if they are there now."""
        missing = min(units, self.burst) - self.level(now)
        return missing / self.rate_per_s if missing > _HARDLY_ANY else 0.0

    def take(self, units: float, now: float) -> None:
        """Takes units, also those that are not there: ask `wait_s` first."""
        self._level = self.level(now) - units

    def give_back(self, units: float, now: float) -> None:
        """Returns units that were taken and not used, as far as there is room for them."""
        self._level = min(self.burst, self.level(now) + units)

    def become(self, units: float, now: float) -> None:
        """Has this number of units from now on, as far as there is room for them."""
        self._at_s, self._level = now, min(self.burst, units)

    def change(self, rate_per_s: float, burst: float, now: float) -> None:
        """Takes another rate and burst from now on. A larger burst is not there at once, but filled."""
        self._level = min(burst, self.level(now))
        self.rate_per_s, self.burst = rate_per_s, burst
