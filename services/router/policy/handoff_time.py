"""Keeps what a pair's handoffs take that nothing hides: a running average. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MIN_HANDOFFS = 20
"""So many must have been seen before the average is trusted."""
MEMORY_S = 60.0
"""An average to which nothing was added for so long is not trusted before the next handoff: a pair that was slow is
tried again now and then."""


@dataclass(slots=True)
class HandoffTime:
    """Averages the newest handoffs of one pair of workers."""

    _num_seen: int = 0
    _average_ms: float = 0.0
    _newest_s: float = 0.0
    _tried_s: float = 0.0
    """When a prompt was last split because the average was not trusted any more."""

    def observe(self, ms: float, now: float) -> None:
        """Adds a handoff that took so long after both its prompt was computed and its decode worker had admitted it."""
        self._num_seen = min(self._num_seen + 1, MIN_HANDOFFS)
        weight = 1 / self._num_seen
        if now - self._newest_s > MEMORY_S:
            weight = max(weight, 0.5)  # what was before says less than usual
        self._average_ms += weight * (ms - self._average_ms)
        self._newest_s = now

    def average_ms(self, now: float) -> float | None:
        """Returns the average in milliseconds; None while it is not known."""
        known = self._num_seen >= MIN_HANDOFFS and now - max(self._newest_s, self._tried_s) <= MEMORY_S
        return self._average_ms if known else None

    def tried(self, now: float) -> None:
        """Notes that a prompt is split to see what the pair takes now: until that is known, the old average counts for
        others."""
        if self.average_ms(now) is None:
            self._tried_s = now
