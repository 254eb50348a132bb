"""Runs streams of requests through a real `baton up` with each preset of placement, and the same in the simulator.

Two prefill and two decode workers of one thread each share the machine. A stream is a trace made small: of
conversations one in so many, with lengths that a small model computes in a fraction of a second, and what prompts share
is shared. It comes at a share of the rate that saturates `least_loaded` by a profile that `baton calibrate --measure`
has just written, so that it suits the machine. A round is: calibrate, then each preset with a cluster of its own, in an
order that is another in each round; the same requests are simulated with the profile of the round.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import Up, cluster
from benchmarks.precision import Precision
from benchmarks.preset_times import PresetTimes
from benchmarks.presets_simulated import PATIENT, at_rate, pool_blocks, runner, saturation, times_of
from benchmarks.replay import replay
from benchmarks.settings import setting
from benchmarks.simulated import calibrated
from services.sim.cluster import SimPlan
from services.sim.profile import WorkerProfile
from services.sim.trace import TracedRequest, scaled
from services.sim.trace_files import read_trace

NUM_PREFILL, NUM_DECODE = 2, 2
_FLAGS = ("--prefill", str(NUM_PREFILL), "--decode", str(NUM_DECODE), "--threads", "1", "--http-port", "-1")
_CALIBRATION_BLOCKS = 2048
_LEAST_BLOCKS = 256
"""Of a pool: four of the longest requests fit."""
_BLOCK = 16
_MOST_TOKENS = 1024
_MOST_REQUESTS = 500
_HEARTBEATS_S = 1.5
"""After which a worker has told of its caches what it had not told yet."""


@dataclass(frozen=True)
class RealSettings:
    rounds: int = setting(1, "rounds of real runs, each with every preset")
    seconds: float = setting(40.0, "of arrivals in a real run, at most")
    real_load: float = setting(0.5, "the real arrivals, as a share of what least_loaded serves at most by calibration")
    real_rate: float = setting(0.0, "real arrivals a second instead of such a share; 0 for the share")
    real_cache_share: float = setting(0.25, "of a stream's blocks, in each real worker's pool")


@dataclass(frozen=True)
class Scale:
    """Says how a trace is made small."""

    one_in: int
    """Conversations that are taken."""
    prompts: float
    """Times the lengths of prompts, and of the blocks that they share."""
    outputs: float


SCALES = {"mooncake": Scale(30, 1 / 32, 1 / 8), "azure": Scale(1, 1 / 4, 1 / 8)}
"""Mooncake's blocks of 512 tokens become 16, which is a block of a worker's pool."""


@dataclass
class Both:
    """Holds the runs of each preset, one a round."""

    simulated: dict[str, list[PresetTimes]]
    measured: dict[str, list[PresetTimes]]


def stream(name: str, trace: Sequence[TracedRequest]) -> list[TracedRequest]:
    """Returns the trace, made small. `name` says whose it is."""
    scale = SCALES[name]
    wanted = [
        dataclasses.replace(each, output_tokens=round(each.output_tokens * scale.outputs / scale.prompts))
        for each in thinned(trace, scale.one_in)
    ]
    return scaled(wanted, length=scale.prompts, rate=1.0, seconds=1e9, most_tokens=_MOST_TOKENS)[:_MOST_REQUESTS]


def thinned(trace: Sequence[TracedRequest], one_in: int) -> list[TracedRequest]:
    """Returns the requests of one conversation in so many, from the first on: what they share is kept. Prompts are of
    one conversation if they begin with the same block; those that name no blocks are each of their own."""
    roots: dict[int, int] = {}
    kept = []
    for number, each in enumerate(trace):
        # Numbers of requests are below 0, so that none is a block's.
        root = each.block_ids[0] if each.block_ids else ~number
        if roots.setdefault(root, len(roots)) % one_in == 0:
            kept.append(each)
    return [dataclasses.replace(each, at_s=each.at_s - kept[0].at_s) for each in kept]


def measure(
    model: str, precision: Precision, traces: Mapping[str, Path], presets: Sequence[str], settings: RealSettings
) -> dict[str, Both]:
    """Returns what came of each trace's stream."""
    streams = {name: stream(name, read_trace(path)) for name, path in traces.items()}
    blocks = {name: _pool(requests, settings.real_cache_share) for name, requests in streams.items()}
    found = {name: Both({each: [] for each in presets}, {each: [] for each in presets}) for name in streams}
    rates: dict[str, float] = {}
    for number in range(1, settings.rounds + 1):
        print(f"real: round {number}, calibration", flush=True)
        with cluster(model, precision, *_FLAGS, "--kv-blocks", str(_CALIBRATION_BLOCKS)) as up:
            profile = calibrated(up, Path("out/presets-profile.json"))
        for name, whole in streams.items():
            run = runner(_plan(profile, blocks[name]))
            rates.setdefault(name, settings.real_rate or settings.real_load * saturation(run, whole))
            requests = [each for each in at_rate(whole, rates[name]) if each.at_s < settings.seconds]
            print(f"real: {name}, {len(requests)} requests, {rates[name]:.3g} a second", flush=True)
            for preset in random.Random(number).sample(presets, len(presets)):
                print(f"real: round {number}, {name}, {preset}", flush=True)
                flags = ("--policy", preset, "--kv-blocks", str(blocks[name]))
                with cluster(model, precision, *_FLAGS, *flags) as up:
                    found[name].measured[preset].append(asyncio.run(_replayed(up, requests, number)))
                found[name].simulated[preset].append(times_of(run(preset, requests)))
    return found


def _pool(requests: Sequence[TracedRequest], share: float) -> int:
    return max(_LEAST_BLOCKS, pool_blocks(requests, share, _BLOCK))


def _plan(profile: WorkerProfile, blocks: int) -> SimPlan:
    return SimPlan(NUM_PREFILL, NUM_DECODE, profile=dataclasses.replace(profile, num_blocks=blocks), router=PATIENT)


async def _replayed(up: Up, requests: Sequence[TracedRequest], seed: int) -> PresetTimes:
    before = _cache_counts(up)
    level = await replay(up.address, requests, seed, 0.0)
    await asyncio.sleep(_HEARTBEATS_S)
    hit, queried = (now - then for now, then in zip(_cache_counts(up), before, strict=True))
    complete = [answer for answer in level.answers if answer.complete]
    return PresetTimes(
        Counter(answer.ttft_ms for answer in complete),
        Counter(gap for answer in complete for gap in answer.gaps_ms),
        100 * hit / queried,
        level.num_failed,
    )


def _cache_counts(up: Up) -> tuple[int, int]:
    """Returns the tokens that prefill workers have found in their caches, and those that they have looked for."""
    loads = [each.load for each in up.status().workers if "prefill" in each.worker.worker_id]
    return sum(load.prefix_tokens_hit for load in loads), sum(load.prefix_tokens_queried for load in loads)
