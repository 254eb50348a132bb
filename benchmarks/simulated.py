"""Compares the simulator with real processes: the same trace, through `baton simulate`'s model with a profile that
`baton calibrate --measure` has just written, and through the cluster that was calibrated.

A round is: start the cluster, calibrate it, replay the trace at each rate, end it. Each rate is simulated with the
profile of the same round, so that what a machine does for minutes is in both.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.answers import Objective, distribution, percentile
from benchmarks.cluster import Up, cluster
from benchmarks.figure import Figure, Findings, Series
from benchmarks.precision import Precision
from benchmarks.replay import Level, ReplaySettings, replay
from services.cli import calibrate
from services.sim.cluster import Served, SimPlan, simulate
from services.sim.profile import WorkerProfile, read_profile
from services.sim.trace import TracedRequest

CLUSTERS = {"split": (1, 1, 0), "mixed": (0, 0, 1)}
_TARGETS = {50: "0.85 … 1.15", 95: "0.75 … 1.25"}
_PERCENTS = (50, 95)


@dataclass
class Pair:
    """Holds one rate of one round, measured and simulated."""

    real: Level
    simulated: list[Served]

    def real_ms(self, metric: str) -> list[float]:
        complete = [answer for answer in self.real.answers if answer.complete]
        if metric == "TTFT":
            return [answer.ttft_ms for answer in complete]
        return [answer.tpot_ms for answer in complete if len(answer.token_times_s) > 1]

    def simulated_ms(self, metric: str) -> list[float]:
        times_s = [served.ttft_s if metric == "TTFT" else served.tpot_s for served in self.simulated]
        return [time_s * 1e3 for time_s in times_s if time_s is not None]

    def attainment(self, objective: Objective) -> tuple[float, float]:
        """Returns the percentages of requests that met it, measured and simulated."""
        good = sum(
            served.ttft_s is not None
            and served.total_s is not None
            and served.ttft_s * 1e3 <= objective.ttft_ms
            and (served.tpot_s or 0.0) * 1e3 <= objective.tpot_ms
            for served in self.simulated
        )
        return self.real.good_percent(objective), 100 * good / len(self.simulated)


def measure(model: str, precision: Precision, repeats: int, trace: ReplaySettings) -> Findings:
    found: Findings = []
    for name, counts in CLUSTERS.items():
        pairs: dict[float, list[Pair]] = {rate: [] for rate in trace.rate_scale}
        for number in range(repeats):
            print(f"sim: round {number + 1}, {name}", flush=True)
            for rate, pair in one_round(model, precision, counts, number, trace).items():
                pairs[rate].append(pair)
        for rate, of_rate in pairs.items():
            found += _figures(f"sim: {name}, trace at {rate:g} x", of_rate, trace)
        found += _lines(name, pairs[trace.rate_scale[-1]])
    return found


def one_round(
    model: str, precision: Precision, counts: tuple[int, int, int], number: int, trace: ReplaySettings
) -> dict[float, Pair]:
    """Returns what was measured and simulated, by rate."""
    flags = [f"--{role}={count}" for role, count in zip(("prefill", "decode", "mixed"), counts, strict=True)]
    pairs: dict[float, Pair] = {}
    with cluster(model, precision, *flags, "--kv-blocks", "2048", "--http-port", "-1") as up:
        profile = calibrated(up, Path(f"out/sim-profile-{'-'.join(map(str, counts))}.json"))
        for rate in trace.rate_scale:
            requests = trace.requests(rate)
            level = asyncio.run(replay(up.address, requests, (number, rate), trace.replay_s))
            pairs[rate] = Pair(level, simulated(counts, profile, requests))
    return pairs


def calibrated(up: Up, path: Path) -> WorkerProfile:
    calibrate.main(["--target", up.control, "--measure", up.address, "--out", str(path)], "baton calibrate")
    return read_profile(path)


def simulated(counts: tuple[int, int, int], profile: WorkerProfile, requests: Sequence[TracedRequest]) -> list[Served]:
    prefill, decode, mixed = counts
    # A replay's prompts are random: none begins as another.
    fresh = [dataclasses.replace(request, block_ids=()) for request in requests]
    return simulate(SimPlan(prefill, decode, mixed, profile=profile), fresh).requests


def _figures(name: str, pairs: Sequence[Pair], trace: ReplaySettings) -> Findings:
    found: Findings = [Figure(f"{name}: requests", "", tuple(float(len(pair.simulated)) for pair in pairs))]
    for metric in ("TTFT", "TPOT"):
        for percent in _PERCENTS:
            real = [percentile(pair.real_ms(metric), percent) for pair in pairs]
            ours = [percentile(pair.simulated_ms(metric), percent) for pair in pairs]
            ratios = tuple(one / other for one, other in zip(ours, real, strict=True))
            found += [
                Figure(f"  {metric} p{percent}, measured", "ms", tuple(real)),
                Figure(f"  {metric} p{percent}, simulated", "ms", tuple(ours)),
                Figure("    simulated over measured", "x", ratios, _TARGETS[percent]),
            ]
    both = [pair.attainment(_tight(pair, trace)) for pair in pairs]
    return [
        *found,
        Figure("  requests within the median TTFT and TPOT times 1.5, measured", "%", tuple(real for real, _ in both)),
        Figure("    simulated", "%", tuple(ours for _, ours in both)),
        Figure("    difference", "points", tuple(ours - real for real, ours in both), "-5 … 5"),
    ]


def _tight(pair: Pair, trace: ReplaySettings) -> Objective:
    """Returns an objective that some requests miss, which says more than one that all meet."""
    ttft_ms, tpot_ms = (1.5 * statistics.median(pair.real_ms(metric)) for metric in ("TTFT", "TPOT"))
    return Objective(ttft_ms, min(trace.slo_tpot_ms, tpot_ms))


def _lines(name: str, pairs: Sequence[Pair]) -> Findings:
    """Returns the distributions of one configuration, all rounds together."""
    return [
        Series(f"sim_{name}", f"{metric}, {how}", distribution([ms for pair in pairs for ms in times(pair, metric)]))
        for metric in ("TTFT", "TPOT")
        for how, times in (("measured", Pair.real_ms), ("simulated", Pair.simulated_ms))
    ]
