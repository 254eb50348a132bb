"""Compares prefill and decode on separate workers with both on one, at equal cores: real clusters in turns, round by
round.

The clusters have the same cores in all: one prefill and one decode worker, one mixed worker, and as many mixed workers
as the first has. A last one, of a single mixed worker on as many cores as a prefill worker has, reads the same prompts
with nothing else to do: what a prompt takes at least.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.answers import Answer, distribution, percentile
from benchmarks.cluster import cluster
from benchmarks.figure import Figure, Findings, Series, ratio
from benchmarks.interference import Interference, InterferenceSettings, idle_prompts, interfere
from benchmarks.precision import Precision
from benchmarks.replay import Level, ReplaySettings, replay

SPLIT, MIXED, TWO_MIXED = "1 prefill + 1 decode", "1 mixed on all cores", "2 mixed"
_FLAGS = {SPLIT: ("--prefill", "1", "--decode", "1"), MIXED: ("--mixed", "1"), TWO_MIXED: ("--mixed", "2")}
_POOL = ("--kv-blocks", "2048", "--http-port", "-1")
_IDLE_PROMPTS = 5


@dataclass
class Rounds:
    """Holds what was measured of one cluster, a sample for each round."""

    interference: list[Interference] = field(default_factory=list)
    levels: dict[float, list[Level]] = field(default_factory=dict)
    """By the rate at which the trace was replayed."""
    idle: list[list[Answer]] = field(default_factory=list)


def measure(
    model: str, precision: Precision, repeats: int, interference: InterferenceSettings, trace: ReplaySettings
) -> Findings:
    clusters = {name: Rounds() for name in _FLAGS}
    alone: list[list[Answer]] = []
    half = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for number in range(repeats):
        for name, flags in _FLAGS.items():
            print(f"split: round {number + 1}, {name}", flush=True)
            with cluster(model, precision, *flags, *_POOL) as up:
                asyncio.run(_round(up.address, number, clusters[name], interference, trace))
        if interference.streams:
            print(f"split: round {number + 1}, one core alone", flush=True)
            with cluster(model, precision, "--mixed", "1", "--threads", half, *_POOL) as up:
                alone.append(asyncio.run(_idle(up.address, number, interference)))
    found: Findings = []
    if interference.streams:
        found += _interference_figures(clusters, alone, interference)
    if trace.replay_s:
        found += _replay_figures(clusters, trace)
    return found


async def _round(
    address: str, number: int, rounds: Rounds, interference: InterferenceSettings, trace: ReplaySettings
) -> None:
    await idle_prompts(address, (number, "warm"), 2, 64, 8)
    if interference.streams:
        rounds.idle.append(await _idle(address, number, interference))
        rounds.interference.append(await interfere(address, number, interference))
    if trace.replay_s:
        for rate in trace.rate_scale:
            level = await replay(address, trace.requests(rate), (number, rate), trace.replay_s)
            rounds.levels.setdefault(rate, []).append(level)


async def _idle(address: str, number: int, interference: InterferenceSettings) -> list[Answer]:
    await idle_prompts(address, (number, "first"), 1, interference.arriving_tokens, interference.arriving_output)
    return await idle_prompts(
        address, (number, "idle"), _IDLE_PROMPTS, interference.arriving_tokens, max(8, interference.arriving_output)
    )


def _interference_figures(
    clusters: dict[str, Rounds], alone: Sequence[Sequence[Answer]], settings: InterferenceSettings
) -> Findings:
    what = f"{settings.streams} streams, a prompt of {settings.arriving_tokens} tokens every {settings.every_s:g} s"
    alone_ms = [statistics.median(answer.ttft_ms for answer in answers) for answers in alone]
    found: Findings = [Figure("split: the prompt's TTFT on one core alone, p50", "ms", tuple(alone_ms))]
    for name, rounds in clusters.items():
        some, ours = rounds.interference, name == SPLIT
        p50, p95, p99 = ([percentile(each.gaps_ms, percent) for each in some] for percent in (50, 95, 99))
        ttft_ms = [percentile(each.ttft_ms, 50) for each in some]
        found += [
            Figure(f"split: {what}; {name}: ITL p50", "ms", tuple(p50)),
            Figure("  ITL p95", "ms", tuple(p95)),
            Figure("  ITL p99", "ms", tuple(p99)),
            ratio("  ITL p99 over p50", p99, p50, "<= 1.3" if ours else ""),
            *_undisturbed(some),
            Figure("  the prompts' TTFT p50", "ms", tuple(ttft_ms)),
            Figure("  the prompts' TTFT p95", "ms", tuple(percentile(each.ttft_ms, 95) for each in some)),
            ratio("  TTFT p50 over that on one core alone", ttft_ms, alone_ms, "<= 1.15" if ours else ""),
            _second_gap(rounds.idle, "<= 1.3" if ours else ""),
        ]
        gaps = [gap for each in some for gap in each.gaps_ms]
        found.append(Series("itl", name, distribution(gaps)))
    return found


def _undisturbed(rounds: Sequence[Interference]) -> list[Figure]:
    """Returns what the machine does to the streams without any prompt; nothing if that was not measured."""
    if not all(each.undisturbed_gaps_ms for each in rounds):
        return []
    p99, p50 = ([percentile(each.undisturbed_gaps_ms, percent) for each in rounds] for percent in (99, 50))
    return [ratio("  the same before the first prompt", p99, p50)]


def _second_gap(rounds: Sequence[Sequence[Answer]], target: str) -> Figure:
    """Computes the gap from the first token to the second, in which a handoff ends, over those after it; nothing else
    runs."""
    first = [statistics.median(answer.gaps_ms[0] for answer in answers) for answers in rounds]
    normal = [statistics.median(gap for answer in answers for gap in answer.gaps_ms[1:]) for answers in rounds]
    return ratio("  idle: first-to-second-token gap over a normal gap", first, normal, target)


def _replay_figures(clusters: dict[str, Rounds], settings: ReplaySettings) -> Findings:
    found: Findings = []
    for rate in settings.rate_scale:
        for name, rounds in clusters.items():
            found += _level_figures(f"split: trace at {rate:g} x; {name}", rounds.levels[rate], settings)
        ours = [level.goodput(settings.objective) for level in clusters[SPLIT].levels[rate]]
        for name in (MIXED, TWO_MIXED):
            theirs = [level.goodput(settings.objective) for level in clusters[name].levels[rate]]
            if all(theirs):
                found.append(ratio(f"split: trace at {rate:g} x: goodput of {SPLIT} over {name}", ours, theirs))
            for percent in (50, 99):
                itl = [[level.itl_ms(percent) for level in clusters[each].levels[rate]] for each in (SPLIT, name)]
                found.append(ratio(f"  ITL p{percent} of {SPLIT} over {name}", *itl))
    for name, rounds in clusters.items():
        for chart, value in (("throughput_ttft", Level.ttft_ms), ("throughput_tpot", Level.tpot_ms)):
            points = tuple(
                (
                    statistics.median(level.output_tok_s for level in levels),
                    statistics.median(value(level, 95) for level in levels),
                )
                for levels in rounds.levels.values()
            )
            found.append(Series(chart, name, points))
    return found


def _level_figures(name: str, levels: Sequence[Level], settings: ReplaySettings) -> Findings:
    objective = settings.objective
    found: Findings = [Figure(f"{name}: output", "tok/s", tuple(level.output_tok_s for level in levels))]
    for what, value in (("TTFT", Level.ttft_ms), ("TPOT", Level.tpot_ms), ("ITL", Level.itl_ms)):
        for percent in (50, 95, 99):
            found.append(Figure(f"  {what} p{percent}", "ms", tuple(value(level, percent) for level in levels)))
    slo = f"TTFT <= {objective.ttft_ms:g} ms and TPOT <= {objective.tpot_ms:g} ms"
    return [
        *found,
        Figure(f"  goodput: {slo}", "requests/s", tuple(level.goodput(objective) for level in levels)),
        Figure("  requests that met it", "%", tuple(level.good_percent(objective) for level in levels)),
        Figure("  requests that failed", "requests", tuple(float(level.num_failed) for level in levels)),
    ]
