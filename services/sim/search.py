"""Searches the cheapest cluster that meets an objective, by simulating clusters in the order of their cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.sim.cluster import SimPlan, simulate
from services.sim.profile import WorkerProfile
from services.sim.report import Objective, summary
from services.sim.trace import TracedRequest

METRICS = ("ttft", "tpot", "itl", "queue")


@dataclass(frozen=True)
class Goal:
    """Keeps upper bounds of percentiles, in milliseconds: of `ttft_p95`, for example."""

    bounds_ms: Mapping[str, float]

    def margin(self, figures: Mapping[str, Any]) -> float:
        """Returns by which share the tightest bound is kept; negative if one is broken, or if a request failed."""
        if figures["num_failed"]:
            return -1.0
        margins: list[float] = []
        for name, bound in self.bounds_ms.items():
            metric, _, percent = name.partition("_")
            margins.append(1 - figures[f"{metric}_ms"][percent] / bound)
        return min(margins)


@dataclass(frozen=True)
class Candidate:
    """Keeps a cluster that was simulated, what it costs an hour, and its margin."""

    plan: SimPlan
    figures: Mapping[str, Any]
    margin: float

    @property
    def name(self) -> str:
        workers = self.figures["workers"].items()
        return ", ".join(f"{count} {role}" for role, count in workers if count)


@dataclass(frozen=True)
class Found:
    """Keeps what a search has found; None for what there is not."""

    best: Candidate | None
    runner_up: Candidate | None
    """The next cheapest of another shape that meets the goal too."""
    unsplit: Candidate | None
    """Mixed workers alone, as many as cost no more than the best, whether they meet the goal or not."""
    num_simulated: int
    nearest: Candidate | None
    """Of those simulated, the one with the largest margin, if none meets the goal."""
    fewest: SimPlan
    """The fewest prefill, decode and mixed workers that could do the work at all, in a split and a mixed cluster."""


def search(
    trace: Sequence[TracedRequest],
    profile: WorkerProfile,
    decode_profile: WorkerProfile | None,
    goal: Goal,
    most_workers: int,
    progress: Callable[[str], None] = lambda line: None,
) -> Found:
    """Simulates clusters of at most so many workers, the cheapest first, until one meets the goal and another too.

    Those that could not finish the work in the trace's time, however well it was spread, are left out.
    """
    objective = Objective(math.inf, math.inf)
    fewest = _fewest(trace, profile, decode_profile)
    good: list[Candidate] = []
    nearest: Candidate | None = None
    num_simulated = 0

    def run(plan: SimPlan) -> Candidate:
        nonlocal num_simulated
        num_simulated += 1
        progress(f"simulating {plan.prefill} prefill, {plan.decode} decode, {plan.mixed} mixed")
        figures = summary(plan, simulate(plan, trace), objective)
        candidate = Candidate(plan, figures, goal.margin(figures))
        progress(f"{candidate.name}: {'meets it' if candidate.margin >= 0 else 'does not'} ({candidate.margin:+.0%})")
        return candidate

    for plan in _by_cost(fewest, most_workers):
        candidate = run(plan)
        if nearest is None or candidate.margin > nearest.margin:
            nearest = candidate
        if candidate.margin >= 0:
            good.append(candidate)
            if len(good) == 2:
                break
    unsplit = None
    if good and good[0].plan.mixed == 0:
        count = int(good[0].plan.cost_per_hour / profile.cost_per_hour) if profile.cost_per_hour else most_workers
        if 1 <= count <= most_workers:
            unsplit = run(dataclasses.replace(good[0].plan, prefill=0, decode=0, mixed=count))
    best, runner_up = (*good, None, None)[:2]
    return Found(best, runner_up, unsplit, num_simulated, None if good else nearest, fewest)


def _fewest(trace: Sequence[TracedRequest], profile: WorkerProfile, decode_profile: WorkerProfile | None) -> SimPlan:
    """Returns how many workers of each role the work needs at least, however well it is spread."""
    of_decode = decode_profile or profile
    seconds = max(trace[-1].at_s, 1e-9) if trace else 1.0
    prefill_s = sum(request.prompt_tokens for request in trace) * profile.ms_per_prefill_token / 1e3
    # The least time that a token takes: in the largest batch there can be.
    token_ms = (of_decode.ms_per_decode_step - of_decode.ms_per_decode_sequence) / of_decode.max_num_seqs
    token_ms = max(0.0, token_ms) + of_decode.ms_per_decode_sequence
    decode_s = sum(request.output_tokens for request in trace) * token_ms / 1e3
    # Work may end some time after the last arrival, so a little too few workers are tried as well.
    prefill, decode, mixed = (
        max(1, math.floor(0.8 * work_s / seconds)) for work_s in (prefill_s, decode_s, max(prefill_s, decode_s))
    )
    return SimPlan(prefill, decode, mixed, profile=profile, decode_profile=decode_profile)


def _by_cost(fewest: SimPlan, most_workers: int) -> Iterator[SimPlan]:
    """Yields the clusters that could do the work at all: split ones and mixed ones, the cheapest first."""
    plans = [
        dataclasses.replace(fewest, prefill=prefill, decode=decode, mixed=0)
        for prefill in range(fewest.prefill, most_workers)
        for decode in range(fewest.decode, most_workers - prefill + 1)
    ]
    plans += [SimPlan(0, 0, mixed, profile=fewest.profile) for mixed in range(fewest.mixed, most_workers + 1)]
    # Of clusters that cost the same, the most even one is tried first.
    yield from sorted(plans, key=lambda plan: (plan.cost_per_hour, abs(plan.prefill - plan.decode), plan.mixed))
