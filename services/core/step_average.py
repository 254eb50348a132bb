"""Averages the newest steps of one kind, so that workers can be compared by what their steps take for what they do.
Pure."""

from __future__ import annotations

from services.core.records import record

_WEIGHT = 0.1
"""Weight of the newest step, after the first ten; these weigh the same."""
_MOST_TIMES = 4.0
"""How many times the expected duration a step counts at most: a pause of the process is no slowness. After steps that
all take longer, the average does so too."""


@record
class StepAverage:
    """Holds moving averages over steps (mirror of `baton.v1.StepAverage`). All are 0 while there was no step."""

    ms: float = 0.0
    """How long a step takes."""
    tokens: float = 0.0
    """The tokens that it computes: of prompts and of decoding sequences."""
    attended_tokens: float = 0.0
    """The sum of what each of these attends to."""
    num_steps: int = 0
    """How many steps since the worker's start have gone into the averages."""

    def after(self, ms: float, tokens: float, attended_tokens: float, num_steps: int = 1) -> StepAverage:
        """Returns the averages after `num_steps` more steps, each of which was like that."""
        weight = max(1 - (1 - _WEIGHT) ** num_steps, num_steps / (self.num_steps + num_steps))
        if most_ms := self.most_ms(StepAverage(ms, tokens, attended_tokens)):
            ms = min(ms, _MOST_TIMES * most_ms)
        return StepAverage(
            self.ms + weight * (ms - self.ms),
            self.tokens + weight * (tokens - self.tokens),
            self.attended_tokens + weight * (attended_tokens - self.attended_tokens),
            self.num_steps + num_steps,
        )

    def most_ms(self, other: StepAverage) -> float:
        """Returns how long the step of `other` takes at most where these steps were measured; 0 if that is not known.

        A step takes a fixed time, and more for each token and for each that these attend to. So twice as much of both
        takes at most twice as long. Less may take as long: the fixed time may be all.
        """
        if not (self.ms and self.tokens and self.attended_tokens):
            return 0.0
        more = max(other.tokens / self.tokens, other.attended_tokens / self.attended_tokens)
        return self.ms * max(1.0, more)
