"""Repeats Splitwise's comparison of clusters (arXiv 2311.18677, section VI) with Baton's router in virtual time.

`python -m benchmarks.splitwise --trace azure_llm_2023_conv.csv --table splitwise_perf_model.csv` finds, for each of the
paper's clusters for conversations, the highest rate of arrivals at which all nine objectives of its table VI are met:
percentiles of TTFT, TPOT and end-to-end time, each divided by what the same request takes alone on an A100 machine.

The steps cost what Splitwise measured (BLOOM-176B, eight GPUs a machine). `--steps tokens` reads the table as the
paper's simulator does, which looks a decode step up by the tokens in it (a batch of 64 as a prompt of 64 tokens), and
`--steps sequences` by its sequences, as it was measured. Prompts are computed in one step, as there; with `--chunked`
in several.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.answers import percentile
from benchmarks.figure import Figure, Findings
from benchmarks.result import Result
from services.router.coordinator.config import CoordinatorConfig
from services.sim.cluster import Served, SimPlan, simulate
from services.sim.profile import WorkerProfile, read_profile
from services.sim.scheduler import WorkerRules
from services.sim.trace import TracedRequest
from services.sim.trace_files import read_trace

A100, H100, H100_CAPPED = "a100-80gb", "h100-80gb", "h100-80gb-pcap"
COST = {A100: 2.21, H100: 4.76, H100_CAPPED: 4.76}
"""Dollars an hour of one GPU, as in the paper's notebook; only ratios matter."""
POWER = {A100: 24.8, H100: 44.0, H100_CAPPED: 44.0 * 0.7}
BOUNDS = {
    "TTFT": {50: 2.0, 90: 3.0, 99: 6.0},
    "TPOT": {50: 1.25, 90: 1.5, 99: 5.0},
    "E2E": {50: 1.25, 90: 1.5, 99: 5.0},
}
"""Table VI of the paper: times as long as alone on an A100 machine."""
_NEAR = 40.0
"""Requests/s, where the search begins if nothing is known."""
_KV_BYTES_PER_TOKEN = 2 * 70 * 14336 * 2
_POOL_BYTES = 8 * 80 * (1 << 30) - 329_000_000_000


@dataclass(frozen=True)
class Design:
    """Names a cluster of the paper: how many machines of which kind prefill, decode or do both."""

    name: str
    budget: str
    prefill: int
    decode: int
    mixed: int = 0
    prefill_hardware: str = A100
    decode_hardware: str = A100

    @property
    def cost(self) -> float:
        return self._sum(COST)

    @property
    def power(self) -> float:
        return self._sum(POWER)

    def _sum(self, of: Mapping[str, float]) -> float:
        return (self.prefill + self.mixed) * of[self.prefill_hardware] + self.decode * of[self.decode_hardware]


DESIGNS = (
    Design("Baseline-A100", "power", 0, 0, 70),
    Design("Baseline-H100", "power", 0, 0, 40, H100, H100),
    Design("Splitwise-AA", "power", 45, 25),
    Design("Splitwise-HH", "power", 25, 15, 0, H100, H100),
    Design("Splitwise-HA", "power", 25, 26, 0, H100, A100),
    Design("Splitwise-HHcap", "power", 25, 21, 0, H100, H100_CAPPED),
    Design("Baseline-A100, equal cost", "cost", 0, 0, 86),
    Design("Splitwise-AA, equal cost", "cost", 51, 35),
    Design("Splitwise-AA, token machines mixed", "power", 45, 0, 25),
    Design("Splitwise-AA, equal cost, token machines mixed", "cost", 51, 0, 35),
)
"""Those that the paper's scripts run for conversations; in the last two the machines for tokens take prompts too, where
those for prompts have too many: Baton's nearest to the paper's pool of machines that change their role."""


def profile_of(table: Path, hardware: str, *, by_sequences: bool) -> WorkerProfile:
    """Returns the costs of one machine."""
    measured = read_profile(table, f"bloom-176b:{hardware}:8")
    decodes = measured.decode_points if by_sequences else _by_tokens(table, hardware)
    return dataclasses.replace(
        measured,
        decode_points=decodes,
        mixed_factor=1.1,  # a step with both, in the paper's simulator
        num_blocks=_POOL_BYTES // _KV_BYTES_PER_TOKEN // 16,
        max_num_seqs=512,
        max_num_batched_tokens=2048,
        kv_bytes_per_token=_KV_BYTES_PER_TOKEN,
        transfer_bytes_per_s=200.0 * (1 << 30),
        transfer_latency_ms=0.0,
        cost_per_hour=8 * COST[hardware],
    )


def _by_tokens(table: Path, hardware: str) -> tuple[tuple[float, float], ...]:
    times: dict[float, list[float]] = {}
    with open(table, newline="") as file:
        for row in csv.DictReader(file):
            if (row["model"], row["hardware"], row["tensor_parallel"]) == ("bloom-176b", hardware, "8"):
                size = int(row["prompt_size"]) * int(row["batch_size"])
                times.setdefault(size, []).append(float(row["token_time"]))
    return tuple((size, statistics.median(values)) for size, values in sorted(times.items()))


def arrivals(whole: Sequence[TracedRequest], rate: float, seconds: float, seed: int) -> list[TracedRequest]:
    """Returns requests at random moments (Poisson), with lengths drawn from the trace, as the paper does it."""
    chance = random.Random(seed)
    requests, at_s = list[TracedRequest](), chance.expovariate(rate)
    while at_s < seconds:
        like = chance.choice(whole)
        requests.append(TracedRequest(at_s, max(1, like.prompt_tokens), max(1, like.output_tokens)))
        at_s += chance.expovariate(rate)
    return requests


class BoundBroken(Exception):
    """Says that so many requests were too slow that a bound is broken whatever the others do."""


class Slowdowns:
    """Collects what each request took, divided by what it takes alone; infinite for those that failed. The paper's
    notebook divides the time after the first token by all tokens, and looks the time of a token alone up by the length
    of the prompt."""

    def __init__(self, alone: WorkerProfile, num_requests: int) -> None:
        """`alone` has decode steps by tokens."""
        self.found: dict[str, list[float]] = {name: [] for name in BOUNDS}
        self._alone = alone
        self._num_requests = num_requests
        self._num_slow = {(name, percent): 0 for name, bounds in BOUNDS.items() for percent in bounds}

    def add(self, served: Served) -> None:
        """Raises BoundBroken, which names the bound and by how much most of those that broke it did so."""
        ttft_s = self._alone.prefill_ms(served.prompt_tokens) / 1e3
        tpot_s = self._alone.decode_ms(served.prompt_tokens) / 1e3
        times = dict.fromkeys(BOUNDS, float("inf"))
        if served.total_s is not None and served.ttft_s is not None:
            whole_s = ttft_s + tpot_s * (served.output_tokens - 1)
            after_s = (served.total_s - served.ttft_s) / served.output_tokens
            times = {"TTFT": served.ttft_s / ttft_s, "TPOT": after_s / tpot_s, "E2E": served.total_s / whole_s}
        for name, slowdown in times.items():
            self.found[name].append(slowdown)
            for percent, bound in BOUNDS[name].items():
                self._num_slow[name, percent] += slowdown > bound
                if self._num_slow[name, percent] > self._num_requests * (100 - percent) / 100 + 1:
                    raise BoundBroken(f"{name} p{percent}")

    def worst(self) -> tuple[float, str]:
        """Returns the largest ratio of a percentile to its bound, and which it is; all are met if it is at most 1."""
        return max(
            (percentile(self.found[name], percent) / bound, f"{name} p{percent}")
            for name, bounds in BOUNDS.items()
            for percent, bound in bounds.items()
        )


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._trace = read_trace(arguments.trace)
        self._chunked = arguments.chunked
        self._seconds, self._seed = arguments.seconds, arguments.seed
        by_sequences = arguments.steps == "sequences"
        self._profiles = {name: profile_of(arguments.table, name, by_sequences=by_sequences) for name in COST}

        self._alone = profile_of(arguments.table, A100, by_sequences=False)

    def run(self, design: Design, rate: float) -> tuple[float, str]:
        plan = SimPlan(
            design.prefill,
            design.decode,
            design.mixed,
            profile=self._profiles[design.prefill_hardware],
            decode_profile=self._profiles[design.decode_hardware],
            rules=WorkerRules(chunked=self._chunked),
            router=CoordinatorConfig(model_context_tokens=1 << 20, max_queue=512),
        )
        requests = arrivals(self._trace, rate, self._seconds, self._seed)
        slowdowns = Slowdowns(self._alone, len(requests))
        try:
            simulate(plan, requests, on_end=slowdowns.add)
        except BoundBroken as broken:
            print(f"{design.name}: {rate:g} requests/s: {broken} is broken", flush=True)
            return float("inf"), str(broken)
        found = slowdowns.worst()
        print(f"{design.name}: {rate:g} requests/s: {found[1]} at {found[0]:.2f} of its bound", flush=True)
        return found

    def highest(self, design: Design, step: float, near: float = _NEAR) -> tuple[float, str]:
        """Returns the highest rate, a multiple of `step`, at which all bounds are met, and what breaks beyond it. It
        looks near the rate `near` first, and in small steps, since far beyond its limit a cluster only queues."""
        low, high, broken, reach = 0, 0, "", 1
        at = max(1, round(near / step))
        while not high or high - low > 1:
            found = self.run(design, at * step)
            if found[0] <= 1:
                low = at
            else:
                high, broken = at, found[1]
            if not high or not low:  # what is on its other side is not known yet
                at = max(1, at + (reach if low else -reach))
                reach *= 2
            else:
                at = (low + high) // 2
        return low * step, broken


def rates_of(path: Path) -> dict[str, float]:
    """Returns the rate of each cluster in a result file."""
    figures = json.loads(path.read_text())["figures"]
    return {each["name"].rpartition(" (")[0]: each["median"] for each in figures if each["unit"] == "requests/s"}


def compared(rates: Mapping[str, float]) -> Findings:
    """Returns the paper's ratios."""
    by_name = {design.name: design for design in DESIGNS}
    found: Findings = []
    for name, other, target in (
        ("Splitwise-AA", "Baseline-A100", "2.15 in the text, 2.35 in the abstract"),
        ("Splitwise-AA", "Baseline-H100", "1.4, at 20 % lower cost"),
        ("Splitwise-AA, equal cost", "Baseline-H100", "1.4, at equal cost"),
        ("Splitwise-HA", "Baseline-H100", "1.18, at 10 % lower cost"),
        ("Splitwise-AA, token machines mixed", "Baseline-A100", "2.15 in the text, 2.35 in the abstract"),
        ("Splitwise-AA, token machines mixed", "Baseline-H100", "1.4, at 20 % lower cost"),
        ("Splitwise-AA, equal cost, token machines mixed", "Baseline-H100", "1.4, at equal cost"),
    ):
        if rates.get(name) and rates.get(other):
            found.append(Figure(f"throughput of {name} over {other}", "x", (rates[name] / rates[other],), target))
            cost = by_name[name].cost / by_name[other].cost
            power = by_name[name].power / by_name[other].power
            found += [Figure("  its cost", "x", (cost,)), Figure("  its power", "x", (power,))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.splitwise", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="Azure's conversations")
    parser.add_argument("--table", type=Path, required=True, help="Splitwise's measurements")
    parser.add_argument("--steps", choices=["tokens", "sequences"], default="tokens", help="(default: tokens)")
    parser.add_argument("--chunked", action="store_true", help="long prompts in chunks, as Baton's workers do it")
    parser.add_argument("--seconds", type=float, default=120.0, help="of arrivals (default: 120)")
    parser.add_argument("--step", type=float, default=2.0, help="between rates, requests/s (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--designs", default="", help="some of them, with semicolons (default: all)")
    parser.add_argument("--near", type=Path, help="an earlier result, near whose rates to look first")
    parser.add_argument("--json", type=Path, default=Path("out/splitwise.json"), help="the result file")
    arguments = parser.parse_args()
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    result, bench = Result(settings), Bench(arguments)
    rates: dict[str, float] = {}
    near = {} if arguments.near is None else rates_of(arguments.near)
    for design in DESIGNS:
        if arguments.designs and design.name not in arguments.designs.split(";"):
            continue
        rates[design.name], broken = bench.highest(design, arguments.step, near.get(design.name, _NEAR))
        machines = f"{design.mixed} mixed" if design.mixed else f"{design.prefill} prefill, {design.decode} decode"
        result.add(
            [Figure(f"{design.name} ({machines})", "requests/s", (rates[design.name],), f"then {broken} breaks")]
        )
    result.add(compared(rates))
    result.write(arguments.json)


if __name__ == "__main__":
    main()
