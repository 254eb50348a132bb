"""Computes how many requests met latency objectives: in all, and of those that were split and of those that were not.

Owns: what a request's latencies are held to, and the arithmetic. Never: which failures count and when a request is
near its objective, which is the router's rule (`services/router/telemetry/slo.py`); where the requests come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from services.router.telemetry.slo import Grade, Objectives, grade, grade_outcome

LATENCIES = ("ttft", "tpot", "itl", "queue", "e2e")
"""To the first token; the mean of the tokens after it; the longest time between two; all waits for a worker; to the
end."""
GROUPS = ("all", "split", "unsplit")
PERCENTS = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """Holds what is known of a request that has ended. Times are milliseconds; None for an event that never came."""

    total_ms: float
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    longest_itl_ms: float | None = None
    failure: str = ""
    """The outcome, if it is a failure's, as metrics name it."""
    is_split: bool | None = None
    """None: it was not given to two workers, nor all of it to one."""
    queue_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Attainment:
    """Counts the requests of one group against one objective. Times are milliseconds."""

    num_counted: int
    """Those that the objective is for."""
    num_met: int
    """Those in time, also those that were near the objective."""
    num_near: int
    percentiles_ms: dict[str, float]
    """Percentiles of those that have the latency, by nearest rank: p50, p95, p99. Empty if none has."""

    @property
    def attained(self) -> float | None:
        return self.num_met / self.num_counted if self.num_counted else None

    @property
    def near(self) -> float | None:
        return self.num_near / self.num_counted if self.num_counted else None


def attainment_of(requests: Sequence[EndedRequest], objectives: Objectives) -> dict[str, dict[str, Attainment]]:
    """Returns by latency and by group how the requests did."""
    groups = {
        "all": requests,
        "split": [request for request in requests if request.is_split],
        "unsplit": [request for request in requests if request.is_split is False],
    }
    return {
        latency: {name: _attainment(latency, group, target_ms(objectives, latency)) for name, group in groups.items()}
        for latency in LATENCIES
    }


def target_ms(objectives: Objectives, latency: str) -> float:
    return float(getattr(objectives, f"{latency}_ms"))


def _attainment(latency: str, requests: Sequence[EndedRequest], target: float) -> Attainment:
    grades = Counter(_grade(latency, request, target) for request in requests)
    met, near, missed = (grades[each] for each in (Grade.MET, Grade.NEAR, Grade.MISSED))
    known = sorted(value for value in (_value(latency, request) for request in requests) if value is not None)
    return Attainment(met + near + missed, met + near, near, _percentiles(known))


def _value(latency: str, request: EndedRequest) -> float | None:
    match latency:
        case "ttft":
            return request.ttft_ms
        case "tpot":
            return request.tpot_ms
        case "itl":
            return request.longest_itl_ms
        case "queue":
            return request.queue_ms
        case _:
            return None if request.failure else request.total_ms


def _grade(latency: str, request: EndedRequest, target: float) -> Grade | None:
    """Returns the grade, or None if the objective is not for this request: it has one token, and so no time between
    two, or it failed in a way that does not count.

    The time to the first token, and that in the queue, are what they are, whatever became of the request. Of a failed
    request's times between tokens, what is known has an end that is not.
    """
    value = _value(latency, request)
    if value is not None and (latency in ("ttft", "queue") or not request.failure):
        return grade(value / 1e3, target / 1e3)
    if not request.failure:
        return None
    elapsed_ms = request.total_ms if latency in ("ttft", "queue", "e2e") else value or 0.0
    return grade_outcome(request.failure, elapsed_ms / 1e3, target / 1e3)


def _percentiles(ordered: Sequence[float]) -> dict[str, float]:
    if not ordered:
        return {}
    return {f"p{percent}": ordered[-(-len(ordered) * percent // 100) - 1] for percent in PERCENTS}
