"""Compares the presets of placement in the simulator, in one scenario made for each of them.

`python -m benchmarks.routing [PRESET ...] [--seeds N,...] [--figure NAME] [--json FILE]` measures the figure that each
preset gets in the scenario of each. Time is virtual: the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figure import Figure, Findings
from benchmarks.result import Result
from services.router.policy import PRESETS
from services.sim.cluster import ROUTER, SimPlan, simulate
from services.sim.profile import WorkerProfile
from services.sim.report import Objective, summary
from services.sim.trace import TracedRequest

PROFILE = WorkerProfile(
    "made up",
    ms_per_prefill_token=0.2,
    ms_per_decode_step=10.0,
    ms_per_decode_sequence=0.5,
    num_blocks=2048,
    kv_bytes_per_token=100_000,
    transfer_bytes_per_s=2e9,
)
"""A prompt of 1000 tokens takes 200 ms, and a pool holds 32768 tokens."""
SMALL = dataclasses.replace(PROFILE, num_blocks=1024)
_PART = 64
"""Tokens of a part that prompts may share."""


@dataclass(frozen=True)
class Scenario:
    """Describes a workload and a cluster on which one preset is meant to be better than all others, by one figure."""

    what: str
    figure: str
    """As in the report of `baton simulate`: "ttft_ms.p95", for example."""
    plan: SimPlan
    trace: Sequence[TracedRequest]

    def run(self, preset: str) -> float:
        """Returns the figure with this preset. Raises AssertionError if a request failed."""
        router = dataclasses.replace(ROUTER, policy=PRESETS[preset])
        plan = dataclasses.replace(self.plan, router=router)
        report = summary(plan, simulate(plan, self.trace), Objective(1.0, 0.05))
        assert not report["num_failed"], f"{preset}: {report['num_failed']}"
        name, _, percent = self.figure.partition(".")
        return float(report[name][percent] if percent else report[name])


def _arrivals(count: int, per_s: float, seed: int) -> Iterator[tuple[int, float, random.Random]]:
    """Yields number, time and source of chance of requests that come at random (Poisson)."""
    chance, at_s = random.Random(seed), 0.0
    for number in range(count):
        yield number, at_s, chance
        at_s += chance.expovariate(per_s)


def _long_tailed(count: int, per_s: float, seed: int) -> list[TracedRequest]:
    """Returns prompts of 150 tokens and more, a few of them of thousands, each of a session of its own."""
    return [
        TracedRequest(at_s, min(6000, int(150 * (1 - chance.random()) ** -0.9)), 8, session=f"single {number}")
        for number, at_s, chance in _arrivals(count, per_s, seed)
    ]


def _documents(
    count: int,
    per_s: float,
    weights: Sequence[float],
    parts: int,
    own: tuple[int, int],
    seed: int,
    *,
    sessions: bool = False,
) -> list[TracedRequest]:
    """Returns prompts that each begin with a document, chosen by weight, of so many parts, and end with tokens of their
    own. Those of `sessions` belong to one each, of which nothing else comes."""
    made = []
    for number, at_s, chance in _arrivals(count, per_s, seed):
        (document,) = chance.choices(range(len(weights)), weights)
        names = tuple(1000 * document + part for part in range(parts))
        session = f"user {number}" if sessions else ""
        made.append(TracedRequest(at_s, parts * _PART + chance.randint(*own), 8, names, _PART, session=session))
    return made


def _sessions(count: int, per_s: float, first_parts: int, seed: int) -> list[TracedRequest]:
    """Returns conversations of five turns, each of which adds eight parts to what was said before, some seconds after
    the turn before it. All begin with the same parts."""
    made = []
    for number, start_s, chance in _arrivals(count, per_s, seed):
        names, at_s = list(range(first_parts)), start_s
        for turn in range(5):
            names += [1_000_000 + 1000 * number + 50 * turn + part for part in range(8)]
            length = len(names) * _PART + chance.randint(1, 60)
            made.append(TracedRequest(at_s, length, 16, tuple(names), _PART, session=f"user {number}"))
            at_s += chance.uniform(3, 8)
    return _in_order(made)


def _in_order(*traces: Sequence[TracedRequest]) -> list[TracedRequest]:
    return sorted((each for trace in traces for each in trace), key=lambda each: each.at_s)


def _round_robin(seed: int) -> Scenario:
    trace = [TracedRequest(at_s, chance.randint(400, 600), 2) for _, at_s, chance in _arrivals(100, 0.8, seed=seed)]
    plan = SimPlan(4, 2, profile=PROFILE, unreported=(("prefill-0", 4.0),))
    return Scenario("few requests, and the worker that wins ties is throttled", "ttft_ms.p50", plan, trace)


def _least_loaded(seed: int) -> Scenario:
    """Makes a worker that was measured, and declared, as four times as fast as others take three times as long."""
    trace = [
        TracedRequest(at_s, 400, 4, session=f"user {number % 5}") for number, at_s, _ in _arrivals(200, 24, seed=seed)
    ]
    plan = SimPlan(
        4,
        2,
        profile=PROFILE,
        slowness=(("prefill-0", 0.25),),
        unreported=(("prefill-0", 12.0),),
        capacities=(("prefill-0", 4.0),),
    )
    return Scenario("a worker is much slower than it was measured and declared", "ttft_ms.p95", plan, trace)


def _weighted(seed: int) -> Scenario:
    trace = [
        TracedRequest(at_s, chance.randint(400, 600), 8, session=f"user {number}")
        for number, at_s, chance in _arrivals(200, 11, seed=seed)
    ]
    slow = tuple((f"prefill-{number}", 4.0) for number in range(3))
    plan = SimPlan(4, 2, profile=PROFILE, unreported=slow, capacities=(("prefill-3", 4.0),))
    return Scenario("one worker is four times as fast, which only its operator knows", "ttft_ms.p95", plan, trace)


def _token_aware(seed: int) -> Scenario:
    plan = SimPlan(4, 2, profile=PROFILE, slowness=(("prefill-0", 4.0), ("prefill-1", 4.0)))
    trace = _long_tailed(250, 6, seed=seed)
    return Scenario("prompts of 150 to 6000 tokens, and half of the workers are slow", "ttft_ms.p95", plan, trace)


def _prefix_aware(seed: int) -> Scenario:
    trace = _documents(160, 7, [1.0] * 20, 8, (1400, 1800), seed=seed)
    plan = SimPlan(4, 2, profile=SMALL)
    what = "twenty system prompts, a quarter of each prompt, in small pools"
    return Scenario(what, "hit_rate", plan, trace)


def _sticky(seed: int) -> Scenario:
    plan = SimPlan(4, 2, profile=PROFILE)
    return Scenario(
        "conversations that begin with one system prompt", "ttft_ms.p95", plan, _sessions(60, 1.6, 16, seed=seed)
    )


def _hybrid(seed: int) -> Scenario:
    plan = SimPlan(4, 2, profile=PROFILE, slowness=(("prefill-0", 2.0),))
    weights = [1 / (1 + number) ** 0.5 for number in range(8)]
    documents = _documents(100, 3, weights, 24, (100, 400), seed=seed + 2)
    trace = _in_order(_sessions(40, 2, 4, seed=seed), _long_tailed(60, 2, seed=seed + 1), documents)
    return Scenario("conversations, documents and others, and a slow worker", "ttft_ms.p95", plan, trace)


def _kv_score(seed: int) -> Scenario:
    weights = [1 / (1 + number) ** 0.6 for number in range(20)]
    documents = _documents(150, 7, weights, 32, (100, 400), seed=seed, sessions=True)
    trace = [dataclasses.replace(each, output_tokens=200) for each in documents]
    plan = SimPlan(0, 0, 4, profile=dataclasses.replace(PROFILE, num_blocks=1536))
    return Scenario("documents and long outputs on mixed workers with small pools", "tpot_ms.p95", plan, trace)


def _pressure(seed: int) -> Scenario:
    trace = [TracedRequest(at_s, chance.randint(1500, 2500), 60) for _, at_s, chance in _arrivals(100, 2.5, seed=seed)]
    plan = SimPlan(1, 2, 1, profile=PROFILE)
    return Scenario("long prompts on prefill, decode and mixed workers", "itl_ms.p99", plan, trace)


SCENARIOS: Mapping[str, Callable[[int], Scenario]] = {
    "round_robin": _round_robin,
    "least_loaded": _least_loaded,
    "weighted": _weighted,
    "token_aware": _token_aware,
    "prefix_aware": _prefix_aware,
    "sticky": _sticky,
    "hybrid": _hybrid,
    "kv_score": _kv_score,
    "pressure": _pressure,
}


def compared(preset: str, seeds: Sequence[int], figure: str = "") -> Findings:
    """Returns the figure that each preset gets in the scenario of `preset`, a sample for each seed."""
    found: dict[str, list[float]] = {name: [] for name in PRESETS}
    for seed in seeds:
        scenario = SCENARIOS[preset](seed)
        scenario = dataclasses.replace(scenario, figure=figure or scenario.figure)
        for name in PRESETS:
            found[name].append(scenario.run(name))
    return [Figure(f"{preset}: {scenario.what}; {scenario.figure}, {name}", "", tuple(found[name])) for name in found]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=__doc__)
    parser.add_argument("preset", nargs="*", help=f"whose scenario is run, of {', '.join(SCENARIOS)} (default: all)")
    parser.add_argument("--seeds", default="1,2,3", help="of arrivals and lengths, a sample for each (default: 1,2,3)")
    parser.add_argument("--figure", default="", help='another figure of the report, such as "ttft_ms.p95"')
    parser.add_argument("--json", type=Path, default=Path("out/routing.json"), help="the result file")
    arguments = parser.parse_args()
    if unknown := set(arguments.preset) - set(SCENARIOS):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    result = Result({name: value for name, value in vars(arguments).items() if name != "json"})
    for preset in arguments.preset or SCENARIOS:
        result.show(compared(preset, [int(seed) for seed in arguments.seeds.split(",")], arguments.figure))
    result.write(arguments.json)


if __name__ == "__main__":
    main()
