"""What steps cost, in milliseconds: measured at start-up, corrected by every step. Routers place work by it. Pure."""

from __future__ import annotations

_WEIGHT = 0.1
"""Of the newest step in the running averages."""
_FEWEST_TOKENS = 16
"""A step with fewer prompt tokens says little about their cost."""


class CostModel:
    def __init__(self) -> None:
        self.ms_per_prefill_token = 0.0
        """0 until known."""
        self.ms_per_decode_step = 0.0
        """Of a step of decodes only, whatever their number; 0 until known."""

    def observe(self, num_prefill_tokens: int, num_decodes: int, ms: float) -> None:
        """A step computed this many prompt tokens, and one token of each of `num_decodes` sequences."""
        if num_prefill_tokens == 0:
            self.ms_per_decode_step = _blend(self.ms_per_decode_step, ms)
        elif num_prefill_tokens >= _FEWEST_TOKENS:
            # Decodes ride along for less than a step of their own: it is the prompt tokens that such a step is for.
            rest = max(ms - self.ms_per_decode_step, ms / 2) if num_decodes else ms
            self.ms_per_prefill_token = _blend(self.ms_per_prefill_token, rest / num_prefill_tokens)


def _blend(average: float, newest: float) -> float:
    return newest if average == 0 else average + _WEIGHT * (newest - average)
