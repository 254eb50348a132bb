"""Judges the mechanisms of the router's queue: each is taken out in turn, and scenarios say who misses it.

`python -m benchmarks.queue_ablation --azure azure_llm_2023_conv.csv --mooncake mooncake_synthetic.jsonl` runs the
router's real coordinator in virtual time. A mechanism is replaced by nothing in memory (`queue_mechanisms.py`), so that
all else is the same. Each scenario runs with several seeds; percentiles are over all of their requests. Times are the
same on every machine, but for the processor time that placing takes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest import mock

from benchmarks import machine
from benchmarks.queue_mechanisms import MECHANISMS
from services.router.coordinator import Coordinator
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.events import Action
from services.router.policy import Split
from services.router.policy.filter import LongPromptConfig
from services.sim.cluster import ROUTER, Death, Served, SimPlan, simulate
from services.sim.profile import WorkerProfile
from services.sim.trace import TracedRequest, scaled, trace_of_tenants
from services.sim.trace_files import read_trace

WORSE = 1.03
"""A figure that is more than this many times as large is missed."""
_LEAST_MS = 20.0
"""Times that differ by less are not told apart: a message takes half a millisecond, a step tens of them."""
_PERCENTS = (50, 95, 99)

Figures = dict[str, float]
"""Of one scenario; less is better."""
Trace = list[TracedRequest]
Case = tuple[SimPlan, Trace]
Scenario = Callable[[int], Case]
"""scenario(seed)"""

PROFILE = WorkerProfile(
    "queue",
    ms_per_prefill_token=0.1,
    ms_per_decode_step=15.0,
    ms_per_decode_sequence=0.3,
    ms_per_prefill_step=5.0,
    max_model_len=65536,
    max_num_batched_tokens=2048,
)
SLOW = dataclasses.replace(PROFILE, ms_per_prefill_token=2.2, ms_per_decode_step=40.0)
"""Computes prompts as a CPU with AVX2 does: 8,192 tokens that wait at a worker take it 18 s."""
SMALL = dataclasses.replace(PROFILE, num_blocks=512)
PATIENT = dataclasses.replace(ROUTER, max_queue=1 << 20, queue_timeout_s=1e9)
"""Refuses nobody: who starves is served last, and shows as the longest wait."""


def traced(path: Path, count: int, rate: float, plan: SimPlan, length: float, seed: int) -> Case:
    """Returns a piece of a trace, at a rate of requests a second."""
    piece = read_piece(path, length)[seed * count : (seed + 1) * count]
    seconds = piece[-1].at_s - piece[0].at_s
    at_s = [(each.at_s - piece[0].at_s) * count / rate / seconds for each in piece]
    return plan, [dataclasses.replace(each, at_s=at) for each, at in zip(piece, at_s, strict=True)]


@functools.cache
def read_piece(path: Path, length: float) -> Trace:
    return scaled(read_trace(path), length=length, rate=1.0, seconds=1e9, most_tokens=32768)


def arrivals(seed: int, count: int, rate: float, one: Callable[[random.Random], TracedRequest]) -> Trace:
    """Returns requests at random times (Poisson)."""
    chance, at_s, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(dataclasses.replace(one(chance), at_s=at_s))
        at_s += chance.expovariate(rate)
    return found


def two_sizes(seed: int, plan: SimPlan, rate: float) -> Case:
    """Mixes small requests with few that need most of a worker's pool."""

    def one(chance: random.Random) -> TracedRequest:
        if chance.random() < 0.03:
            return TracedRequest(0.0, chance.randint(6000, 7000), 200, priority=-1)
        return TracedRequest(0.0, chance.randint(100, 500), chance.randint(20, 200))

    return plan, arrivals(seed, 200, rate, one)


def high_priority(seed: int, plan: SimPlan, rate: float, prompt: int) -> Case:
    """Floods with high priority, more than can be served, beside two lower ones."""

    def one(chance: random.Random) -> TracedRequest:
        priority = chance.choices((5, 1, 0), (0.9, 0.07, 0.03))[0]
        return TracedRequest(
            0.0, chance.randint(prompt // 2, prompt * 3 // 2), chance.randint(8, 200), priority=priority
        )

    return plan, arrivals(seed, 300, rate, one)


def full_of_high_priority(seed: int) -> Case:
    """Has high priorities fill a queue of eight all the time, beside a low one that comes now and then."""
    plan = SimPlan(1, 1, profile=SLOW, router=dataclasses.replace(ROUTER, max_queue=8))

    def one(chance: random.Random) -> TracedRequest:
        priority = 1 if chance.random() < 0.9 else 0
        return TracedRequest(0.0, chance.randint(1500, 2500), 8, priority=priority)

    return plan, arrivals(seed, 300, 1.0, one)


def overload(seed: int) -> Case:
    """Sends twice what can be served to a queue of 48, of three priorities and two lengths, with deadlines for some."""

    def one(chance: random.Random) -> TracedRequest:
        output = chance.choice((30, 400))
        deadline_s = 20.0 if chance.random() < 0.3 else None
        priority = chance.choices((1, 0, -1), (0.5, 0.4, 0.1))[0]
        return TracedRequest(0.0, chance.randint(100, 800), output, priority=priority, deadline_s=deadline_s)

    router = dataclasses.replace(ROUTER, max_queue=48)
    return SimPlan(2, 2, profile=SMALL, router=router, asked_tokens=1000), arrivals(seed, 400, 40.0, one)


def tenants(seed: int, router: CoordinatorConfig) -> Case:
    """Has one tenant send twenty times what another sends, more than can be served."""
    return SimPlan(2, 2, profile=PROFILE, router=router), trace_of_tenants({"light": 0.8, "flood": 16.0}, 40, seed)


def lost_workers(seed: int) -> Case:
    """Ends workers, some of them together, while requests run on all of them."""
    deaths = [Death(worker_id, at_s) for at_s in (8.0, 16.0, 24.0) for worker_id in ("prefill-0", "decode-0")]
    deaths += [Death("decode-1", 16.4), Death("prefill-1", 24.4)]
    plan = SimPlan(3, 3, profile=SMALL, router=PATIENT, deaths=tuple(deaths), cold_start_s=3.0)
    return plan, arrivals(seed, 250, 11.0, lambda chance: TracedRequest(0.0, chance.randint(300, 1700), 120))


def lost_rack(seed: int) -> Case:
    """Ends most workers within half a second, one after the other, while requests go from each to the next."""
    deaths = [Death(f"mixed-{number}", at_s + 0.15 * number) for at_s in (6.0, 16.0) for number in range(4)]
    plan = SimPlan(0, 0, 6, profile=PROFILE, router=PATIENT, deaths=tuple(deaths), cold_start_s=3.0)
    return plan, arrivals(seed, 300, 15.0, lambda chance: TracedRequest(0.0, chance.randint(300, 1700), 120))


def lost_big_worker(seed: int) -> Case:
    """Ends the only worker that can hold some of the requests."""
    deaths = (Death("decode-0", 4.0),)
    big = dataclasses.replace(PROFILE, num_blocks=2048)
    plan = SimPlan(0, 1, 2, profile=SMALL, decode_profile=big, router=PATIENT, deaths=deaths, cold_start_s=20.0)

    def one(chance: random.Random) -> TracedRequest:
        return TracedRequest(0.0, 9000 if chance.random() < 0.15 else chance.randint(100, 500), chance.randint(20, 100))

    return plan, arrivals(seed, 300, 10.0, one)


def long_prompts(seed: int, rate: float, share: float) -> Case:
    """Mixes short prompts with ones of many thousands of tokens."""

    def one(chance: random.Random) -> TracedRequest:
        is_long = chance.random() < share
        return TracedRequest(0.0, chance.randint(*((12_000, 20_000) if is_long else (200, 800))), 8)

    router = dataclasses.replace(PATIENT, long_prompts=LongPromptConfig(isolation="auto"))
    roomy = dataclasses.replace(PROFILE, num_blocks=20_000, transfer_bytes_per_s=2e10)
    return SimPlan(4, 2, profile=roomy, router=router), arrivals(seed, 400, rate, one)


def scenarios(azure: Path, mooncake: Path) -> dict[str, Scenario]:
    split, mixed = (
        SimPlan(2, 2, profile=PROFILE, router=PATIENT),
        SimPlan(mixed=3, prefill=0, decode=0, profile=PROFILE),
    )
    auto = dataclasses.replace(PATIENT, split=Split.AUTO)
    roomy = dataclasses.replace(PROFILE, num_blocks=8192)
    slow = SimPlan(1, 1, profile=SLOW, router=PATIENT)
    return {
        "azure": lambda seed: traced(azure, 300, 11.5, split, 1.0, seed),
        "azure, split auto": lambda seed: traced(azure, 250, 14.0, dataclasses.replace(split, router=auto), 1.0, seed),
        "mooncake": lambda seed: traced(mooncake, 200, 8.0, SimPlan(3, 2, profile=roomy, router=PATIENT), 0.25, seed),
        "two sizes": lambda seed: two_sizes(seed, SimPlan(2, 2, profile=SMALL, router=PATIENT), 17.0),
        "two sizes, mixed": lambda seed: two_sizes(
            seed, dataclasses.replace(mixed, profile=SMALL, router=PATIENT), 25.0
        ),
        "two sizes, split auto": lambda seed: two_sizes(seed, SimPlan(2, 2, profile=SMALL, router=auto), 18.0),
        "high priority": lambda seed: high_priority(seed, SimPlan(2, 2, profile=SMALL, router=PATIENT), 24.0, 500),
        "high priority, slow prompts": lambda seed: high_priority(seed, slow, 1.2, 600),
        "full of high priority": full_of_high_priority,
        "overload": overload,
        "tenants": lambda seed: tenants(seed, PATIENT),
        "tenants, full queue": lambda seed: tenants(seed, dataclasses.replace(ROUTER, max_queue=32)),
        "lost workers": lost_workers,
        "a rack is lost": lost_rack,
        "the big worker is lost": lost_big_worker,
        "long prompts": lambda seed: long_prompts(seed, 20.0, 0.06),
        "more long prompts than can be served": lambda seed: long_prompts(seed, 24.0, 0.1),
    }


@contextlib.contextmanager
def watched(spent: list[float], commands: Counter[str]) -> Iterator[None]:
    """Adds the processor time of each placement to `spent`, and counts what workers are sent."""
    place, take_actions = Coordinator.place, Coordinator.take_actions

    def placing(self: Coordinator, now: float) -> None:
        began_s = time.process_time()
        place(self, now)
        spent.append(time.process_time() - began_s)

    def taking(self: Coordinator) -> list[Action]:
        actions = take_actions(self)
        commands.update(type(action).__name__ for action in actions)
        return actions

    with mock.patch.multiple(Coordinator, place=placing, take_actions=taking):
        yield


def figures(scenario: Scenario, seeds: int) -> Figures:
    served: list[Served] = []
    spent: list[float] = []
    seconds, commands = 0.0, Counter[str]()
    with watched(spent, commands):
        for seed in range(seeds):
            plan, trace = scenario(seed)
            outcome = simulate(plan, trace)
            served += outcome.requests
            seconds += outcome.seconds
    errors = Counter(each.error for each in served if each.error)
    found = {
        **_percentiles("ttft_ms", [each.ttft_s for each in served]),
        **_percentiles("tpot_ms", [each.tpot_s for each in served]),
        "lowest_class_longest_wait_ms": _longest_ms(_lowest(served)),
        "refused": float(errors.pop("OVERLOADED", 0)),
        "lost": float(errors.total()),
        "retries": float(sum(each.num_retries for each in served)),
        "seconds": seconds,
        "commands": float(commands["SendLeg"]),
        "placing_us_per_request": 1e6 * sum(spent) / len(served),
    }
    if len(classes := {each.priority for each in served}) > 1:
        lowest = [each for each in served if each.priority == min(classes)]
        found["lowest_class_failed"] = float(sum(bool(each.error) for each in lowest))
        of_highest = [each.ttft_s for each in served if each.priority == max(classes)]
        found |= _percentiles("highest_class_ttft_ms", of_highest)
    if len(names := {each.tenant for each in served}) > 1:
        light = min(names, key=lambda name: sum(each.tenant == name for each in served))
        of_light = [each for each in served if each.tenant == light]
        found |= _percentiles("light_tenant_ttft_ms", [each.ttft_s for each in of_light])
        found["light_tenant_refused"] = float(sum(bool(each.error) for each in of_light))
    return found


def _lowest(served: list[Served]) -> list[Served]:
    """Returns those of the lowest priority, or where all are of one, the tenth with the most tokens of prompt and
    output: what is hardest to place."""
    if len({each.priority for each in served}) > 1:
        return [each for each in served if each.priority == min(other.priority for other in served)]
    return sorted(served, key=lambda each: each.prompt_tokens + each.output_tokens)[-(len(served) // 10) :]


def _longest_ms(served: list[Served]) -> float:
    return 1e3 * max((each.ttft_s for each in served if each.ttft_s is not None), default=0.0)


def _percentiles(name: str, values: list[float | None]) -> Figures:
    ordered = sorted(value * 1e3 for value in values if value is not None)
    return {f"{name}.p{percent}": ordered[len(ordered) * percent // 100] for percent in _PERCENTS if ordered}


def missed(found: Mapping[str, Figures], without: Mapping[str, Figures]) -> list[str]:
    """Returns what is more than 3 % worse without a mechanism, the processor time left out."""
    lines = []
    for name, before in found.items():
        for figure, value in before.items():
            after, is_time = without[name].get(figure, 0.0), figure.endswith("_ms") or "_ms." in figure
            least = 0.5 if "tpot" in figure else _LEAST_MS if is_time else max(2.0, 0.01 * value)
            if figure != "placing_us_per_request" and after > value * WORSE and after - value >= least:
                lines.append(f"{name}: {figure} {value:.5g} -> {after:.5g}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue_ablation", description=__doc__)
    parser.add_argument("--azure", type=Path, required=True)
    parser.add_argument("--mooncake", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=MECHANISMS, default=list(MECHANISMS), help="mechanisms")
    parser.add_argument("--scenarios", nargs="*", help="(default: all)")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    all_of_them = scenarios(options.azure, options.mooncake)
    chosen = {name: all_of_them[name] for name in options.scenarios or all_of_them}
    result: dict[str, object] = {"machine": machine.describe(), "seeds": options.seeds}
    base = {}
    for name, scenario in chosen.items():
        base[name] = figures(scenario, options.seeds)
        print(
            f"{time.process_time():.1f}",
            name,
            {figure: float(f"{value:.5g}") for figure, value in base[name].items()},
            flush=True,
        )
    result["figures"], judged = base, dict[str, list[str]]()
    result["missed_without"] = judged
    for mechanism in options.only:
        with MECHANISMS[mechanism]():
            without = {}
            for name, scenario in chosen.items():
                try:
                    without[name] = figures(scenario, options.seeds)
                except AssertionError as error:
                    without[name] = dict.fromkeys(base[name], float("inf"))
                    print(f"{mechanism}, {name}: {error}")
        judged[mechanism] = missed(base, without)
        print(f"\n{mechanism}:", *judged[mechanism] or ["nobody misses it"], sep="\n  ", flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1, default=str) + "\n")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
