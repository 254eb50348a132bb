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
from benchmarks.presets_simulated import MOST_TOKENS, PATIENT, at_rate, pool_blocks, runner, saturation
from benchmarks.result import Result
from benchmarks.split_choice import profiles
from services.router.policy import PRESETS
from services.sim.cluster import SimPlan
from services.sim.report import Objective, summary
from services.sim.trace import TracedRequest, scaled
from services.sim.trace_files import read_trace


@dataclass(frozen=True)
class Workload:
    """Holds a trace, and the cluster whose prefill workers' pools hold a share of its distinct blocks."""

    trace: Sequence[TracedRequest]
    plan: SimPlan

    def run(self, preset: str, rate: float, *, exact: bool = False) -> dict[str, float]:
        """Returns hit rate (%), and TTFT p50 and p95 (ms). Raises AssertionError if a request failed."""
        plan = dataclasses.replace(self.plan, knows_caches_at_once=exact)
        report = summary(plan, runner(plan)(preset, at_rate(self.trace, rate)), Objective(2.0, 0.1))
        assert not report["num_failed"], f"{preset}: {report['num_failed']}"
        return {
            "hit rate": 100 * report["hit_rate"],
            "TTFT p50": report["ttft_ms"]["p50"],
            "TTFT p95": report["ttft_ms"]["p95"],
        }


def workload(trace: Sequence[TracedRequest], table: Path, share: float) -> Workload:
    """Returns the trace with workers each of whose pools holds a share of its distinct blocks."""
    profile = dataclasses.replace(profiles(table)["a100"], max_model_len=MOST_TOKENS)  # caches of decodes are not short
    of_prefill = dataclasses.replace(profile, num_blocks=pool_blocks(trace, share, profile.block_size))
    return Workload(trace, SimPlan(4, 4, profile=of_prefill, decode_profile=profile, router=PATIENT))


def measure(load: Workload, presets: Sequence[str], shares: Sequence[float]) -> Findings:
    most = saturation(runner(load.plan), load.trace)
    found: Findings = [Figure("least_loaded saturates at", "requests/s", (most,))]
    for share in shares:
        rate = share * most
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
        read_trace(arguments.trace), length=1.0, rate=1.0, seconds=arguments.seconds, most_tokens=MOST_TOKENS
    )
    load = workload(trace, arguments.table, arguments.cache_share)
    result = Result({name: str(value) for name, value in vars(arguments).items() if name != "json"})
    result.add(measure(load, arguments.presets.split(","), [float(each) for each in arguments.load.split(",")]))
    result.write(arguments.json)


if __name__ == "__main__":
    main()
