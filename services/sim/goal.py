"""Says what a cluster must keep, and ends simulations that cannot keep it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.core.errors import ConfigError
from services.sim.cluster import Served
from services.sim.report import PERCENTS, Objective

_ROUNDING = 1e-9
"""A time that is as long as its bound but for an error of rounding keeps it."""
METRICS = ("ttft", "tpot", "itl", "queue")


class Hopeless(Exception):
    """Says that a bound is broken by far, whatever the requests do that have not ended."""

    def __init__(self, bound: str, attainment: float) -> None:
        """`attainment` is the largest share of requests that may still be good."""
        super().__init__(f"{bound} is broken")
        self.bound = bound
        self.attainment = attainment


@dataclass(frozen=True)
class Goal:
    """Keeps upper bounds of percentiles, in milliseconds: of `ttft_p95`, for example."""

    bounds_ms: Mapping[str, float]

    @property
    def objective(self) -> Objective:
        """Returns what one request must keep to count as good: the tightest bound of each metric but `itl`, whose
        percentiles are of the gaps of all requests."""
        tightest = dict.fromkeys(METRICS, math.inf)
        for name, bound in self.bounds_ms.items():
            metric = name.partition("_")[0]
            tightest[metric] = min(tightest[metric], bound / 1e3)
        return Objective(tightest["ttft"], tightest["tpot"], tightest["queue"])

    def margins(self, figures: Mapping[str, Any]) -> dict[str, float]:
        """Returns by which share each bound is kept; negative if it is broken."""
        found = {}
        for name, bound in self.bounds_ms.items():
            metric, _, percent = name.partition("_")
            margin = 1 - figures[f"{metric}_ms"][percent] / bound
            found[name] = 0.0 if abs(margin) < _ROUNDING else margin
        return found

    def margin(self, figures: Mapping[str, Any]) -> float:
        """Returns by which share the tightest bound is kept; negative if one is broken."""
        return min(self.margins(figures).values())

    def bounds_of(self, metric: str) -> list[tuple[int, float]]:
        """Returns the percentile and the bound, in seconds, of each bound of a metric."""
        named = [(name.partition("_p"), bound) for name, bound in self.bounds_ms.items()]
        return [(int(percent), bound / 1e3) for (of, _, percent), bound in named if of == metric]

    def of(self, metrics: Sequence[str]) -> Goal:
        return Goal({name: bound for name, bound in self.bounds_ms.items() if name.partition("_")[0] in metrics})


def parse_goal(text: str) -> Goal:
    """Returns the bounds that a value of `--slo` such as "ttft_p95=500ms,tpot_p95=50ms" names. Raises ConfigError."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"([a-z]+)_p(\d+)=(\d+(?:\.\d+)?)(ms|s)", part.strip(), re.ASCII)
        if match is None or match[1] not in METRICS or match[2] not in map(str, PERCENTS):
            percents = ", ".join(f"p{percent}" for percent in PERCENTS)
            raise ConfigError(
                f"--slo: {part!r} is not like ttft_p95=500ms; there are {', '.join(METRICS)} and {percents}"
            )
        bound_ms = float(match[3]) * (1000 if match[4] == "s" else 1)
        if not 0 < bound_ms <= 1e12:
            raise ConfigError(f"--slo: {part!r} must be above 0, and at most a thousand million seconds")
        name = f"{match[1]}_p{match[2]}"
        if name in bounds:
            raise ConfigError(f"--slo: {name} has two bounds")
        bounds[name] = bound_ms
    return Goal(bounds)


class Watch:
    """Ends a simulation whose requests are late so often that a bound is broken by far: twice as many as may be."""

    def __init__(self, goal: Goal, num_requests: int) -> None:
        self._bounds: list[tuple[str, str, float, float]] = []
        for name, bound in goal.bounds_ms.items():
            metric, _, percent = name.partition("_p")
            if metric in ("ttft", "tpot"):
                self._bounds.append((name, metric, bound / 1e3, 2 * (100 - int(percent)) / 100 * num_requests + 1))
        self._num_late = [0] * len(self._bounds)
        self._num_requests = num_requests

    def look(self, served: Served) -> None:
        for number, (name, metric, bound_s, most) in enumerate(self._bounds):
            time_s = served.ttft_s if metric == "ttft" else served.tpot_s
            # Of one that failed, `summary` counts the TPOT that it should have had.
            failed = bool(served.error) and (metric == "ttft" or served.output_tokens > 1)
            if failed or (time_s is not None and time_s > bound_s):
                self._num_late[number] += 1
                if self._num_late[number] > most:
                    raise Hopeless(name, 1 - self._num_late[number] / self._num_requests)
