"""Runs traces through simulated clusters with each preset of placement.

The large cluster is four prefill and four decode workers that cost what Splitwise measured of Llama2-70B on A100
machines, at a share of the rate that saturates it. Time is virtual: the figures are the same on every machine.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from benchmarks.preset_times import PresetTimes
from benchmarks.settings import setting
from benchmarks.split_choice import profiles
from services.router.coordinator.config import CoordinatorConfig
from services.router.policy import PRESETS
from services.sim.cluster import Outcome, SimPlan, simulate
from services.sim.trace import TracedRequest, scaled
from services.sim.trace_files import read_trace

PATIENT = CoordinatorConfig(model_context_tokens=1 << 20, max_queue=1 << 20, queue_timeout_s=86_400.0)
"""Refuses nobody, however long it takes: all presets serve the same requests."""
MOST_TOKENS = 200_000
_FIRST, _FLOOD, _OVERLOAD = 500, 100.0, 1.15
"""What saturates is what is served of arrivals a little faster than what is served of the first 500 at once."""

Run = Callable[[str, Sequence[TracedRequest]], Outcome]
"""run(preset, requests)"""


@dataclass(frozen=True)
class SimulatedSettings:
    table: str = setting("", "Splitwise's table of measurements: what simulated workers cost")
    load: float = setting(0.7, "the simulated arrivals, as a share of what least_loaded serves at most")
    cache_share: float = setting(0.1, "of a trace's blocks, in each simulated prefill worker's pool")
    azure_s: float = setting(600.0, "seconds of Azure's trace that are simulated; Mooncake's is, as a whole")


def measure(name: str, trace: Path, presets: Sequence[str], settings: SimulatedSettings) -> dict[str, PresetTimes]:
    """Returns what came of the trace with each preset. `name` says whose it is."""
    seconds = settings.azure_s if name == "azure" else 1e9
    requests = scaled(read_trace(trace), length=1.0, rate=1.0, seconds=seconds, most_tokens=MOST_TOKENS)
    profile = dataclasses.replace(profiles(Path(settings.table))["a100"], max_model_len=MOST_TOKENS)
    of_prefill = profile
    if blocks := pool_blocks(requests, settings.cache_share, profile.block_size):  # 0: prompts share nothing
        of_prefill = dataclasses.replace(profile, num_blocks=blocks)
    plan = SimPlan(4, 4, profile=of_prefill, decode_profile=profile, router=PATIENT)
    most = saturation(runner(plan), requests)
    rate = settings.load * most
    print(f"{name}: {len(requests)} requests, {rate:.3g} a second, of {most:.3g} that least_loaded serves", flush=True)
    one = partial(_times, plan, at_rate(requests, rate))
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        return dict(zip(presets, pool.map(one, presets), strict=True))


def _times(plan: SimPlan, requests: Sequence[TracedRequest], preset: str) -> PresetTimes:
    found = times_of(runner(plan)(preset, requests))
    print(preset, flush=True)
    return found


def runner(plan: SimPlan) -> Run:
    """Returns what runs requests through the cluster with a preset."""

    def run(preset: str, requests: Sequence[TracedRequest]) -> Outcome:
        router = dataclasses.replace(plan.router, policy=PRESETS[preset])
        return simulate(dataclasses.replace(plan, router=router), requests)

    return run


def times_of(outcome: Outcome) -> PresetTimes:
    """Raises AssertionError if a request failed."""
    failed = Counter(served.error for served in outcome.requests if served.error)
    assert not failed, failed
    return PresetTimes(
        Counter(served.ttft_s * 1e3 for served in outcome.requests if served.ttft_s is not None),
        {gap_s * 1e3: count for gap_s, count in outcome.gaps_s.items()},
        100
        * sum(each.cached_tokens for each in outcome.requests)
        / sum(each.prompt_tokens for each in outcome.requests),
    )


def at_rate(trace: Sequence[TracedRequest], rate: float) -> list[TracedRequest]:
    """Returns the trace with so many requests a second."""
    own = len(trace) / trace[-1].at_s
    return [dataclasses.replace(each, at_s=each.at_s * own / rate) for each in trace]


def saturation(run: Run, trace: Sequence[TracedRequest]) -> float:
    """Returns the requests a second that `least_loaded` serves when more arrive."""
    first = trace[:_FIRST]
    at_once = len(first) / run("least_loaded", at_rate(first, _FLOOD)).seconds
    return len(trace) / run("least_loaded", at_rate(trace, _OVERLOAD * at_once)).seconds


def pool_blocks(trace: Sequence[TracedRequest], share: float, block_size: int) -> int:
    """Returns how many blocks hold a share of the trace's distinct ones."""
    num_tokens = sum({block: each.block_tokens for each in trace for block in each.block_ids}.values())
    return int(share * num_tokens / block_size)
