"""Compares `--split auto` with always and never splitting, on Azure's conversations in virtual time.

`python -m benchmarks.split_choice --trace azure_llm_2023_conv.csv --table splitwise_perf_model.csv` runs pieces of the
trace through clusters of several shapes, at several rates, of workers that cost what Splitwise measured of Llama2-70B
and of ones that cost about what a CPU does. It prints the p95 of TTFT and TPOT with each of the three, and those of
`auto` divided by the better of the other two, one by one: it is not enough to be as good as one of them in both.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figure import Figure, Findings
from benchmarks.result import Result
from services.router.policy import Split
from services.sim.cluster import ROUTER, SimPlan, simulate
from services.sim.profile import WorkerProfile, read_profile
from services.sim.report import Objective, summary
from services.sim.trace import TracedRequest, scaled
from services.sim.trace_files import read_trace

_METRICS = ("ttft", "tpot")
TARGET = "at most 1.05"


@dataclass(frozen=True)
class Case:
    workers: str
    """The profile's name."""
    prefill: int
    decode: int
    rate: float
    """Times the trace's arrivals."""
    length: float = 1.0
    """Times the trace's lengths."""

    @property
    def name(self) -> str:
        lengths = f", lengths x {self.length:g}" if self.length != 1 else ""
        return f"{self.workers}, {self.prefill} prefill + {self.decode} decode, trace x {self.rate:g}{lengths}"


CASES = (
    Case("a100", 4, 4, 1.0),
    Case("a100", 4, 4, 1.6),
    Case("a100", 2, 6, 0.4),
    Case("a100", 2, 6, 0.6),
    Case("a100", 2, 6, 0.75),
    Case("a100", 2, 6, 0.9),
    Case("a100", 6, 2, 1.0),
    Case("h100", 4, 4, 2.4),
    Case("h100", 2, 6, 1.2),
    Case("h100", 6, 2, 1.8),
    Case("cpu", 1, 1, 0.2, 0.25),
    Case("cpu", 2, 2, 0.6, 0.25),
    Case("cpu", 1, 3, 0.3, 0.25),
)
CPU = WorkerProfile(
    "cpu",
    ms_per_prefill_token=0.5,
    ms_per_decode_step=25.0,
    ms_per_decode_sequence=1.5,
    num_blocks=8192,
    kv_bytes_per_token=23040,
    transfer_bytes_per_s=2e9,
    transfer_latency_ms=2.0,
)


def profiles(table: Path) -> Mapping[str, WorkerProfile]:
    found = {"cpu": CPU}
    for name in ("a100", "h100"):
        found[name] = dataclasses.replace(
            read_profile(table, f"llama2-70b:{name}-80gb"),
            num_blocks=100_000,
            max_num_seqs=256,
            kv_bytes_per_token=327_680,
            transfer_bytes_per_s=25e9,
            transfer_latency_ms=5.0,
        )
    return found


def piece(trace: Sequence[TracedRequest], start_s: float, case: Case, seconds: float) -> list[TracedRequest]:
    """Returns the requests of so many seconds of the trace, from `start_s` on, scaled for the case."""
    return scaled(trace, length=case.length, rate=case.rate, seconds=seconds, most_tokens=32768, skip_s=start_s)


def p95s(case: Case, profile: WorkerProfile, trace: Sequence[TracedRequest], split: Split) -> Mapping[str, float]:
    """Returns the 95th percentiles of TTFT and TPOT in milliseconds; infinite if so many requests failed."""
    router = dataclasses.replace(ROUTER, split=split)
    plan = SimPlan(case.prefill, case.decode, profile=profile, router=router)
    figures = summary(plan, simulate(plan, trace), Objective(2.0, 0.1))
    return {metric: figures[f"{metric}_ms"]["p95"] for metric in _METRICS}


def compared(case: Case, profile: WorkerProfile, pieces: Sequence[Sequence[TracedRequest]]) -> Findings:
    """Returns the figures of each way, and how much worse `auto` is than the better of the others."""
    found: dict[Split, list[Mapping[str, float]]] = {
        split: [p95s(case, profile, each, split) for each in pieces] for split in Split
    }
    figures: Findings = []
    for metric in _METRICS:
        for split in Split:
            name = f"{case.name}: {metric.upper()} p95, {split.value}"
            figures.append(Figure(name, "ms", tuple(each[metric] for each in found[split])))
        ratios = tuple(
            auto[metric] / min(always[metric], never[metric])
            for auto, always, never in zip(found[Split.AUTO], found[Split.ALWAYS], found[Split.NEVER], strict=True)
        )
        figures.append(Figure("  auto over the better of the others", "x", ratios, TARGET))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split_choice", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="Azure's conversations")
    parser.add_argument("--table", type=Path, required=True, help="Splitwise's measurements")
    parser.add_argument("--seconds", type=float, default=150.0, help="of each piece (default: 150)")
    parser.add_argument(
        "--starts", default="0,900,1800", help="where pieces begin, in seconds of the trace (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, default=Path("out/split-choice.json"), help="the result file")
    arguments = parser.parse_args()
    starts = [float(start) for start in arguments.starts.split(",")]
    result = Result({name: value for name, value in vars(arguments).items() if name != "json"})
    trace, of_workers = read_trace(arguments.trace), profiles(arguments.table)
    for case in CASES:
        pieces = [piece(trace, at, case, arguments.seconds) for at in starts]
        result.show(compared(case, of_workers[case.workers], pieces))
    result.write(arguments.json)


if __name__ == "__main__":
    main()
