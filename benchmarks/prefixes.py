"""Judges what is known of prefix caches, in the simulator: hit rate and time to first token beside `least_loaded`, and
beside a router that knows at each choice what stands in the caches at that moment.

`python -m benchmarks.prefixes --trace mooncake_synthetic.jsonl --table splitwise_perf_model.csv` runs four prefill and
four decode workers (Llama2-70B on A100 machines), prefill workers' pools holding a share of the trace's distinct blocks
each, at shares of the rate that saturates `least_loaded`. Time is virtual: the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figure import Figure, Findings
from benchmarks.result import Result
from benchmarks.split_choice import profiles
from services.router.coordinator.config import CoordinatorConfig
from services.router.policy import PRESETS
from services.sim.cluster import SimPlan, simulate
from services.sim.profile import WorkerProfile
from services.sim.report import Objective, summary
from services.sim.trace import TracedRequest, scaled
from services.sim.trace_files import read_trace

NUM_PREFILL, NUM_DECODE = 4, 4
_MOST_TOKENS = 200_000
_MOST_QUEUE = 1 << 20
_PATIENCE_S = 86_400.0
_FIRST, _FLOOD, _OVERLOAD = 500, 100.0, 1.15
"""What saturates is what is served of arrivals a little faster than what is served of the first 500 at once."""


@dataclass(frozen=True)
class Workload:
    """Holds a trace, and the profile of workers whose pools hold a share of its distinct blocks."""

    trace: Sequence[TracedRequest]
    profile: WorkerProfile
    decode_profile: WorkerProfile

    def at(self, rate: float) -> list[TracedRequest]:
        """Returns the trace with so many requests a second."""
        own = len(self.trace) / self.trace[-1].at_s
        return [dataclasses.replace(each, at_s=each.at_s * own / rate) for each in self.trace]

    def run(self, preset: str, rate: float, *, exact: bool = False) -> dict[str, float]:
        """Returns hit rate (%), TTFT p50 and p95 (ms), and requests served in a second. Raises AssertionError if a
        request failed."""
        router = CoordinatorConfig(
            model_context_tokens=1 << 20, policy=PRESETS[preset], max_queue=_MOST_QUEUE, queue_timeout_s=_PATIENCE_S
        )
        plan = SimPlan(
            NUM_PREFILL,
            NUM_DECODE,
            profile=self.profile,
            decode_profile=self.decode_profile,
            router=router,
            knows_caches_at_once=exact,
        )
        outcome = simulate(plan, self.at(rate))
        report = summary(plan, outcome, Objective(2.0, 0.1))
        assert not report["num_failed"], f"{preset}: {report['num_failed']}"
        return {
            "hit rate": 100 * report["hit_rate"],
            "TTFT p50": report["ttft_ms"]["p50"],
            "TTFT p95": report["ttft_ms"]["p95"],
            "served": len(self.trace) / outcome.seconds,
        }


def workload(trace: Sequence[TracedRequest], table: Path, share: float) -> Workload:
    """Returns the trace with workers each of whose pools holds a share of its distinct blocks."""
    num_tokens = sum({block: each.block_tokens for each in trace for block in each.block_ids}.values())
    profile = dataclasses.replace(
        profiles(table)["a100"], max_model_len=_MOST_TOKENS
    )  # caches of decodes are not short
    of_prefill = dataclasses.replace(profile, num_blocks=int(share * num_tokens / profile.block_size))
    return Workload(trace, of_prefill, profile)


def measure(load: Workload, presets: Sequence[str], shares: Sequence[float]) -> Findings:
    first = dataclasses.replace(load, trace=load.trace[:_FIRST]).run("least_loaded", _FLOOD)["served"]
    saturation = load.run("least_loaded", _OVERLOAD * first)["served"]
    found: Findings = [Figure("least_loaded saturates at", "requests/s", (saturation,))]
    for share in shares:
        rate = share * saturation
        base = load.run("least_loaded", rate)
        found += _rows(f"least_loaded at {share:.0%} ({rate:.2f} requests/s)", base)
        for preset in presets:
            known = load.run(preset, rate)
            found += _rows(f"{preset} at {share:.0%}", known)
            if preset != "least_loaded" and PRESETS[preset].hash_prompts:
                exact = load.run(preset, rate, exact=True)
                behind = exact["hit rate"] - known["hit rate"]
                found.append(Figure("  hit rate that exact and instant knowledge gives", "%", (exact["hit rate"],)))
                found.append(Figure("  hit rate behind it", "points", (behind,), "<= 3"))
            less = 1 - known["TTFT p50"] / base["TTFT p50"]
            found.append(Figure("  TTFT p50 less than least_loaded's by", "%", (100 * less,), ">= 25"))
    return found


def _rows(name: str, figures: dict[str, float]) -> Findings:
    units = {"hit rate": "%", "TTFT p50": "ms", "TTFT p95": "ms"}
    return [Figure(f"{name}: {what}", unit, (figures[what],)) for what, unit in units.items()]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefixes", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="a trace whose prompts tell what they share")
    parser.add_argument("--table", type=Path, required=True, help="Splitwise's table of measurements")
    parser.add_argument("--seconds", type=float, default=1e9, help="of the trace (default: all of it)")
    parser.add_argument("--cache-share", type=float, default=0.1, help="of its blocks, in each pool (default: 0.1)")
    parser.add_argument("--load", default="0.5,0.7,0.9", help="shares of the saturation (default: %(default)s)")
    parser.add_argument("--presets", default="prefix_aware,hybrid,kv_score", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("out/prefixes.json"), help="the result file")
    arguments = parser.parse_args()
    trace = scaled(
        read_trace(arguments.trace), length=1.0, rate=1.0, seconds=arguments.seconds, most_tokens=_MOST_TOKENS
    )
    load = workload(trace, arguments.table, arguments.cache_share)
    result = Result({name: str(value) for name, value in vars(arguments).items() if name != "json"})
    result.add(measure(load, arguments.presets.split(","), [float(each) for each in arguments.load.split(",")]))
    result.write(arguments.json)


if __name__ == "__main__":
    main()
