"""Computes what a client sees of one answer, and figures of many: percentiles, and goodput under an objective. Pure.

The terms are those of Splitwise (arXiv 2311.18677, table II): time to first token (TTFT), time per output token after
it (TPOT), and the gaps between tokens one by one (inter-token latency, ITL).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

QUANTILE_SHARES = tuple(number / 100 for number in range(100)) + tuple(number / 1000 for number in range(991, 1001))


@dataclass
class Answer:
    """Records one request, from the moment when the client sends it. Times are of one clock, in seconds."""

    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    """When each token reached the client. Tokens of one message share a time."""
    refused: str = ""
    """The name of the gRPC status, if the request failed."""

    @property
    def complete(self) -> bool:
        return bool(self.token_times_s) and not self.refused

    @property
    def ttft_ms(self) -> float:
        return (self.token_times_s[0] - self.sent_s) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Returns the milliseconds per token after the first; 0 for an answer of one token, which has none."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) * 1e3 if len(times) > 1 else 0.0

    @property
    def gaps_ms(self) -> list[float]:
        return self.gaps_within(-math.inf, math.inf)

    def gaps_within(self, from_s: float, to_s: float) -> list[float]:
        """Returns the gaps between tokens, in milliseconds, that end in this time."""
        times = self.token_times_s
        return [(now - before) * 1e3 for before, now in itertools.pairwise(times) if from_s <= now <= to_s]


@dataclass(frozen=True)
class Objective:
    """Bounds what a client of a service accepts of every answer (a service level objective)."""

    ttft_ms: float
    tpot_ms: float

    def met_by(self, answer: Answer) -> bool:
        return answer.complete and answer.ttft_ms <= self.ttft_ms and answer.tpot_ms <= self.tpot_ms


def goodput(answers: Sequence[Answer], objective: Objective, seconds: float) -> float:
    """Returns the requests a second that met the objective: refused ones and late ones do not count."""
    return sum(map(objective.met_by, answers)) / seconds


def percentile(samples: Iterable[float], percent: float) -> float:
    """Returns the value that `percent` of the samples do not pass, on a straight line between the two nearest.

    Raises ValueError without samples.
    """
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("no samples")
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def distribution(samples: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Returns points (value, percent of the samples that do not pass it): every percent, and tenths of the last."""
    return tuple((percentile(samples, 100 * share), 100 * share) for share in QUANTILE_SHARES)
