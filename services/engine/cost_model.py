"""Estimates what steps cost, in milliseconds: measured at start-up, corrected by every step. Pure.

Routers place work by these numbers.
"""

from __future__ import annotations

_WEIGHT = 0.1
"""Weight of the newest step in the running averages."""
_FEWEST_TOKENS = 16
"""Fewest prompt tokens of a step that is used to measure their cost; a smaller step says little about it."""
_LEAST_VARIANCE = 0.25
"""Variance of the number of sequences that steps must show before the cost of one more sequence is computed."""


class CostModel:
    """The measured costs of one worker."""

    def __init__(self) -> None:
        self.ms_per_prefill_token = 0.0
        """Milliseconds for a prompt token; 0 until known."""
        self._decode = _FittedLine()

    @property
    def ms_per_decode_step(self) -> float:
        """Returns the milliseconds of a decode step of one sequence; 0 until known."""
        return self._decode.at(1)

    @property
    def ms_per_decode_sequence(self) -> float:
        """Returns the milliseconds that each further sequence adds to a decode step; 0 until known."""
        return self._decode.slope

    def observe(self, num_prefill_tokens: int, num_decodes: int, ms: float) -> None:
        """Adds a step of `ms` milliseconds that computed so many prompt tokens, and one token of each of `num_decodes`
        sequences."""
        if num_prefill_tokens == 0:
            self._decode.observe(num_decodes, ms)
        elif num_prefill_tokens >= _FEWEST_TOKENS:
            # Decodes in a step with prompt tokens cost less than a step of their own, so at least half of the time
            # counts as that of the prompt tokens.
            rest = max(ms - self._decode.at(num_decodes), ms / 2) if num_decodes else ms
            newest = rest / num_prefill_tokens
            before = self.ms_per_prefill_token
            self.ms_per_prefill_token = before + _WEIGHT * (newest - before) if before else newest


class _FittedLine:
    """A least-squares line through points whose weight falls with their age."""

    def __init__(self) -> None:
        self.slope = 0.0
        """Growth of y for each 1 of x. It stays as it is while the points' x vary too little to tell."""
        self._x = self._y = self._variance = self._covariance = 0.0

    def observe(self, x: float, y: float) -> None:
        if self._y == 0:
            self._x, self._y = x, y
            return
        dx, dy = x - self._x, y - self._y
        self._x += _WEIGHT * dx
        self._y += _WEIGHT * dy
        self._variance = (1 - _WEIGHT) * (self._variance + _WEIGHT * dx * dx)
        self._covariance = (1 - _WEIGHT) * (self._covariance + _WEIGHT * dx * dy)
        if self._variance >= _LEAST_VARIANCE:
            # Each further sequence costs something, and never more than its share of a whole step.
            self.slope = min(max(0.0, self._covariance / self._variance), self._y / self._x)

    def at(self, x: float) -> float:
        return max(0.0, self._y + self.slope * (x - self._x))
