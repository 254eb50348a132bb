"""What steps cost, in milliseconds: measured at start-up, corrected by every step. Routers place work by it. Pure."""

from __future__ import annotations

_WEIGHT = 0.1
"""Of the newest step in the running averages."""
_FEWEST_TOKENS = 16
"""A step with fewer prompt tokens says little about their cost."""
_LEAST_VARIANCE = 0.25
"""Of the number of sequences, before steps tell what one more of them costs."""


class CostModel:
    def __init__(self) -> None:
        self.ms_per_prefill_token = 0.0
        """0 until known."""
        self._decode = _Line()

    @property
    def ms_per_decode_step(self) -> float:
        """Of a step of one sequence; 0 until known."""
        return self._decode.at(1)

    @property
    def ms_per_decode_sequence(self) -> float:
        """What each further sequence adds to a step; 0 until known."""
        return self._decode.slope

    def observe(self, num_prefill_tokens: int, num_decodes: int, ms: float) -> None:
        """A step computed this many prompt tokens, and one token of each of `num_decodes` sequences."""
        if num_prefill_tokens == 0:
            self._decode.observe(num_decodes, ms)
        elif num_prefill_tokens >= _FEWEST_TOKENS:
            # Decodes ride along for less than a step of their own: it is the prompt tokens that such a step is for.
            rest = max(ms - self._decode.at(num_decodes), ms / 2) if num_decodes else ms
            newest = rest / num_prefill_tokens
            before = self.ms_per_prefill_token
            self.ms_per_prefill_token = before + _WEIGHT * (newest - before) if before else newest


class _Line:
    """A line of least squares through points that fade with age."""

    def __init__(self) -> None:
        self.slope = 0.0
        """While all points have the same x, what it was before."""
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
