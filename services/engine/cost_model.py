"""Estimates the cost of steps in milliseconds, from measurements at start-up and from every step. Pure.

Owns: the estimates, which routers use to place work and to refuse what cannot be done in time. Never: clocks; durations
and the present are arguments.

Steps of each kind have a line: a fixed part, and a part for each prompt token or for each decoding sequence. So a tiny
step says something of the fixed part, and little of what each token of a large one takes. The start-up's measurements
always count for a few steps, and what was observed counts less with its age. So a worker that has had few steps, or
none for some minutes, is taken to be as fast as it was at its start: a refused request could not correct the estimate
that refused it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_WEIGHT = 0.05
"""Weight of the newest step beside those before it."""
_START_STEPS = 4.0
"""Weight of the measurements of the start, all together, in steps."""
_HALF_LIFE_S = 60.0
"""Seconds after which a step counts half as much."""
_MOST_TIMES = 3.0
"""The longest time that a step counts as, in multiples of what was expected: a pause is no slowness. After steps that
all take longer, more is expected."""
_FEWEST_TOKENS = 16
"""Fewest prompt tokens of a step whose duration counts for their cost. A smaller step takes nearly as long as one with
no prompt tokens."""
_LEAST_VARIANCE = 0.25
"""Variance of the sizes of steps, below which the cost of a further token or sequence is not computed."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Holds what steps cost at one moment, in milliseconds. All are 0 until a step has shown it."""

    ms_per_prefill_token: float
    """What a prompt token takes in a step of `tokens_per_prefill_step` of them, its share of the fixed part included.
    In smaller steps it takes more."""
    ms_per_further_prefill_token: float
    """What each further prompt token adds to a step. That is less than its share, since a step has a fixed part; it is
    its share until steps of different lengths have shown more."""
    tokens_per_prefill_step: float
    """Prompt tokens of the largest step so far."""
    ms_per_decode_step: float
    """What a decode step of one sequence takes."""
    ms_per_decode_sequence: float
    """What each further sequence adds to a decode step."""


class CostModel:
    """Keeps the measured costs of one worker's steps."""

    def __init__(self) -> None:
        self._most_tokens = 0
        self._prefill, self._decode = _FittedLine(from_zero=True), _FittedLine()
        self._stretch = 1.0
        """How many times as long as expected the newest step with a prompt took; at least 1."""

    def at(self, now: float) -> StepCosts:
        """Returns the costs as of `now`, in seconds of the clock that `observe` is told."""
        tokens, prefill, decode = self._most_tokens, self._prefill.fit(now), self._decode.fit(now)
        share_ms = prefill.at(tokens) / tokens if tokens else 0.0
        return StepCosts(share_ms, prefill.slope or share_ms, float(tokens), decode.at(1), decode.slope)

    def tokens_within(self, ms: float, now: float) -> int | None:
        """Returns how many prompt tokens a step should have at most that is to take no longer than `ms`; None while it
        is not known what they cost.

        If the newest step was held up, the next is expected to be held up as much."""
        costs = self.at(now)
        if not costs.ms_per_prefill_token:
            return None
        fixed_ms = self._prefill.fit(now).at(0)
        return max(_FEWEST_TOKENS, int((ms / self._stretch - fixed_ms) / costs.ms_per_further_prefill_token))

    def calibrate(self, num_prefill_tokens: int, num_decodes: int, ms: float) -> None:
        """Adds a step of the start-up, which had prompt tokens or decodes. To these costs the estimates return."""
        if num_prefill_tokens:
            self._most_tokens = max(self._most_tokens, num_prefill_tokens)
            self._prefill.calibrate(num_prefill_tokens, ms)
        else:
            self._decode.calibrate(num_decodes, ms)

    def observe(
        self, num_prefill_tokens: int, num_decodes: int, ms: float, now: float, *, held_up: bool = False
    ) -> None:
        """Adds a step of `ms` milliseconds that ended at `now` and computed `num_prefill_tokens` tokens of prompts, and
        the next token of `num_decodes` sequences. `held_up` says that it did not run for most of its time, so that it
        shows nothing of what steps cost."""
        if num_prefill_tokens == 0:
            if not held_up:
                self._decode.observe(num_decodes, ms, now)
        elif num_prefill_tokens >= _FEWEST_TOKENS:
            # Decodes in a step with prompt tokens cost less than a step of their own. So that subtracting the cost of
            # such a step does not leave too little, the prompt tokens count for at least half of the time.
            rest = max(ms - self._decode.fit(now).at(num_decodes), ms / 2) if num_decodes else ms
            expected_ms = self._prefill.fit(now).at(num_prefill_tokens)
            self._stretch = max(1.0, rest / expected_ms) if expected_ms else 1.0
            if not held_up:
                self._most_tokens = max(self._most_tokens, num_prefill_tokens)
                self._prefill.observe(num_prefill_tokens, rest, now)


@dataclass(slots=True)
class _Points:
    """Sums up points with their weights."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.weight += 1.0
        self.x += x
        self.y += y
        self.xx += x * x
        self.xy += x * y

    def times(self, factor: float) -> _Points:
        return _Points(*(factor * sum_ for sum_ in (self.weight, self.x, self.y, self.xx, self.xy)))

    def plus(self, other: _Points) -> _Points:
        return _Points(
            self.weight + other.weight,
            self.x + other.x,
            self.y + other.y,
            self.xx + other.xx,
            self.xy + other.xy,
        )


@dataclass(frozen=True, slots=True)
class _Line:
    x: float
    """The mean of the points, through which the line goes."""
    y: float
    slope: float
    """Growth of y for each 1 of x."""

    def at(self, x: float) -> float:
        return max(0.0, self.y + self.slope * (x - self.x))


class _FittedLine:
    """Fits a line to points by least squares. The weight of a point falls exponentially with the number of later ones
    and with its age, but for those of the start."""

    def __init__(self, *, from_zero: bool = False) -> None:
        """`from_zero` says that the line goes through 0 until points have shown its slope; else it is flat."""
        self._from_zero = from_zero
        self._start, self._seen = _Points(), _Points()
        self._seen_s = 0.0
        self._slope: float | None = None
        """The newest slope that was shown. It stays as it is while the x of the points vary less than
        `_LEAST_VARIANCE`."""

    def calibrate(self, x: float, y: float) -> None:
        self._start.add(x, y)

    def observe(self, x: float, y: float, now: float) -> None:
        expected = self.fit(now).at(x)
        self._seen = self._seen.times(_left(now - self._seen_s) * (1 - _WEIGHT))
        self._seen.add(x, min(y, _MOST_TIMES * expected) if expected else y)
        self._seen_s = now
        shown = self._shown_slope(self._points(now))
        self._slope = self._slope if shown is None else shown

    def fit(self, now: float) -> _Line:
        points = self._points(now)
        if not points.weight:
            return _Line(0.0, 0.0, 0.0)
        x, y = points.x / points.weight, points.y / points.weight
        slope = self._shown_slope(points)
        if slope is None:
            slope = self._slope
        if slope is None:
            slope = y / x if self._from_zero else 0.0
        # Each further one costs something, and never more than its share of a whole step.
        return _Line(x, y, min(max(0.0, slope), y / x))

    def _points(self, now: float) -> _Points:
        seen = self._seen.times(_left(now - self._seen_s))
        return seen.plus(self._start.times(_START_STEPS / self._start.weight)) if self._start.weight else seen

    def _shown_slope(self, points: _Points) -> float | None:
        x, y = points.x / points.weight, points.y / points.weight
        variance = points.xx / points.weight - x * x
        return (points.xy / points.weight - x * y) / variance if variance >= _LEAST_VARIANCE else None


def _left(seconds: float) -> float:
    """Returns which part of a point's weight is left when it is `seconds` old."""
    return math.exp2(-max(0.0, seconds) / _HALF_LIFE_S)
