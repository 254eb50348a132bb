"""Estimates the cost of steps in milliseconds, from measurements at start-up and from every step. Pure.

Owns: the estimates, which routers use to place work. Never: clocks; durations are arguments.
"""

from __future__ import annotations

_WEIGHT = 0.1
"""Weight of the newest step in the exponential moving averages."""
_FEWEST_TOKENS = 16
"""Fewest prompt tokens of a step whose duration counts for their cost. A smaller step takes nearly as long as one with
no prompt tokens."""
_LEAST_VARIANCE = 0.25
"""Variance of the number of sequences in decode steps, below which the cost of a further sequence is not computed."""


class CostModel:
    """Keeps the measured costs of one worker's steps."""

    def __init__(self) -> None:
        self.ms_per_prefill_token = 0.0
        """Milliseconds that a prompt token takes; 0 until a step has shown it."""
        self.tokens_per_prefill_step = 0.0
        """Prompt tokens of the steps that have shown it; an average with the same weights."""
        self._prefill = _FittedLine()
        self.num_prefill_steps = 0
        self.num_decode_steps = 0
        self._decode = _FittedLine()

    @property
    def ms_per_further_prefill_token(self) -> float:
        """Returns the milliseconds that each further prompt token adds to a step.

        That is less than its share, since a step takes some time for however few. It is that share until steps of
        different lengths have shown more."""
        return self._prefill.slope or self.ms_per_prefill_token

    @property
    def ms_per_decode_step(self) -> float:
        """Returns the milliseconds that a decode step of one sequence takes; 0 until a step has shown it."""
        return self._decode.at(1)

    @property
    def ms_per_decode_sequence(self) -> float:
        """Returns the milliseconds that each further sequence adds to a decode step; 0 until steps have shown it."""
        return self._decode.slope

    def observe(self, num_prefill_tokens: int, num_decodes: int, ms: float) -> None:
        """Adds a step of `ms` milliseconds that computed `num_prefill_tokens` tokens of prompts, and the next token of
        `num_decodes` sequences."""
        if num_prefill_tokens == 0:
            self.num_decode_steps += 1
            self._decode.observe(num_decodes, ms)
        elif num_prefill_tokens >= _FEWEST_TOKENS:
            # Decodes in a step with prompt tokens cost less than a step of their own. So that subtracting the cost of
            # such a step does not leave too little, the prompt tokens count for at least half of the time.
            rest = max(ms - self._decode.at(num_decodes), ms / 2) if num_decodes else ms
            self.num_prefill_steps += 1
            self.ms_per_prefill_token = _averaged(self.ms_per_prefill_token, rest / num_prefill_tokens)
            self._prefill.observe(num_prefill_tokens, rest)
            self.tokens_per_prefill_step = _averaged(self.tokens_per_prefill_step, num_prefill_tokens)


def _averaged(before: float, newest: float) -> float:
    return before + _WEIGHT * (newest - before) if before else newest


class _FittedLine:
    """Fits a line to points by least squares. The weight of a point falls exponentially with its age."""

    def __init__(self) -> None:
        self.slope = 0.0
        """Growth of y for each 1 of x. It stays as it is while the x of the points vary less than
        `_LEAST_VARIANCE`."""
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
