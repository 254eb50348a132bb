"""Checks plans by running them: a cluster is calibrated, `baton plan`'s search finds the cheapest one for a trace, and
the trace is replayed through a real cluster of that shape.

A worker is one core of this machine, so there are as many as it has cores. What is compared is the share of requests
within the bounds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.answers import Objective
from benchmarks.cluster import cluster
from benchmarks.figure import Figure, Findings
from benchmarks.precision import Precision
from benchmarks.replay import ReplaySettings, replay
from benchmarks.settings import setting
from benchmarks.simulated import Pair, calibrated, simulated
from services.sim.goal import parse_goal
from services.sim.profile import WorkerProfile
from services.sim.search import Candidate, search
from services.sim.trace import TracedRequest

_FLAGS = ("--threads", "1", "--kv-blocks", "2048", "--http-port", "-1")
_ALLOWANCE = 1.5


@dataclass(frozen=True)
class PlannedSettings:
    slo: str = setting(
        "",
        "bounds to plan for, such as ttft_p50=300ms,tpot_p50=20ms; by default half of the requests may take half as "
        "long again as the median one alone, so that some miss them and some do not",
    )


def measure(
    model: str, precision: Precision, repeats: int, trace: ReplaySettings, settings: PlannedSettings
) -> Findings:
    """Plans and replays at the last of the trace's rates, in each round anew."""
    found: Findings = []
    requests = trace.requests(trace.rate_scale[-1])
    for number in range(1, repeats + 1):
        print(f"plan: round {number}", flush=True)
        with cluster(model, precision, "--prefill=1", "--decode=1", *_FLAGS) as up:
            profile = calibrated(up, Path("out/plan-profile.json"))
        slo = settings.slo or _default_slo(profile, requests)
        planned = _planned(profile, requests, slo)
        print(f"plan: {planned.name} for {slo}", flush=True)
        counts = (planned.plan.prefill, planned.plan.decode, planned.plan.mixed)
        flags = [f"--{role}={count}" for role, count in zip(("prefill", "decode", "mixed"), counts, strict=True)]
        with cluster(model, precision, *flags, *_FLAGS) as up:
            level = asyncio.run(replay(up.address, requests, (number, "plan"), trace.replay_s))
        verdict = "meets" if planned.meets_it else "is the nearest to"
        name = f"plan: round {number}, {planned.name} {verdict} {slo}"
        found += _figures(name, Pair(level, simulated(counts, profile, requests)), slo)
    return found


def _planned(profile: WorkerProfile, requests: Sequence[TracedRequest], slo: str) -> Candidate:
    """Returns the cheapest cluster that meets the bounds; where none does, the one that comes nearest."""
    fresh = [dataclasses.replace(request, block_ids=()) for request in requests]
    found = search(fresh, profile, None, parse_goal(slo), len(os.sched_getaffinity(0)))
    planned = found.best or found.nearest
    assert planned is not None, "something was tried"
    return planned


def _default_slo(profile: WorkerProfile, requests: Sequence[TracedRequest]) -> str:
    size = statistics.median_low(request.prompt_tokens for request in requests)
    ttft_ms = profile.ms_per_request + profile.prefill_ms(size, size * size / 2)
    return f"ttft_p50={_ALLOWANCE * ttft_ms:.0f}ms,tpot_p50={_ALLOWANCE * profile.decode_ms(1, size):.1f}ms"


def _figures(name: str, pair: Pair, slo: str) -> Findings:
    objective = parse_goal(slo).objective
    bounds = Objective(objective.ttft_s * 1e3, objective.tpot_s * 1e3)
    real, predicted = pair.attainment(bounds)
    return [
        Figure(f"{name}: requests", "", (float(len(pair.simulated)),)),
        Figure("  within the bounds, predicted", "%", (predicted,)),
        Figure("  within the bounds, measured", "%", (real,)),
        Figure("    difference", "points", (predicted - real,), "-5 … 5"),
    ]
