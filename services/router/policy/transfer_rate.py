"""Keeps how fast blocks come from one worker to another: over the newest handoffs, by their bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_LEAST_BYTES = 256 << 10
"""Handoffs of less say how long a copy takes to begin."""
_LEAST_MS, _MOST_MS = 1e-3, 86_400_000.0
_MOST_BYTES_PER_S = 1e15
"""Beyond what any memory gives, whatever a worker says."""
_KEPT = 0.9
"""The share of what was seen that counts on when another handoff is seen."""


@dataclass(slots=True)
class TransferRate:
    """Averages the rates of one pair's handoffs, each by its bytes."""

    _num_bytes: float = 0.0
    _ms: float = 0.0

    def observe(self, num_bytes: int, copy_ms: float) -> bool:
        """Adds a handoff, as its destination reports it; what makes no sense is left out. Returns whether it counts."""
        if num_bytes < _LEAST_BYTES or not _LEAST_MS <= copy_ms <= _MOST_MS:  # also where it is not a number
            return False
        self._num_bytes = _KEPT * self._num_bytes + num_bytes
        self._ms = _KEPT * self._ms + copy_ms
        return True

    @property
    def bytes_per_s(self) -> float | None:
        """Returns the rate; None while it is not known."""
        return min(self._num_bytes / self._ms * 1000, _MOST_BYTES_PER_S) if self._ms else None
