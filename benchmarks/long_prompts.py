"""Compares `--isolate-long-prompts auto` with `off`: the times to the first token of short and of long prompts, on
made-up prompts, on Mooncake's trace and on Azure's conversations, in virtual time.

`python -m benchmarks.long_prompts --trace mooncake_synthetic.jsonl,azure_llm_2023_conv.csv` cuts outputs to 20 tokens,
scales arrivals until prefill workers compute for 70 % of the time without isolation, and prints each figure both ways.
Which prompts are called short here is fixed for a workload, and not what the router finds long meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.answers import percentile
from benchmarks.figure import Figure, Findings
from benchmarks.presets_simulated import PATIENT, runner
from benchmarks.result import Result
from services.router.policy.filter import LongPromptConfig
from services.sim.cluster import Outcome, SimPlan
from services.sim.profile import WorkerProfile
from services.sim.trace import TracedRequest
from services.sim.trace_files import read_trace

PROFILE = WorkerProfile(
    "made up",
    ms_per_prefill_token=0.1,
    ms_per_attended_token=3e-6,
    ms_per_decode_step=15.0,
    ms_per_decode_sequence=0.3,
    num_blocks=50_000,
    max_model_len=200_000,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    transfer_bytes_per_s=2e10,
)
_OUTPUT_TOKENS = 20
_MORE_TRIES, _NEAR = 3, 0.02


@dataclass(frozen=True)
class Case:
    name: str
    trace: Sequence[TracedRequest]
    short: int
    """The longest prompt that is called short."""
    prefill: int
    busy: float = 0.7
    policy: str = "pressure"

    @property
    def what(self) -> str:
        policy = f", {self.policy}" if self.policy != "pressure" else ""
        return f"{self.name}, {self.prefill} prefill workers, busy for {self.busy:.0%}{policy}"

    def run(self, rate: float, isolation: str) -> Outcome:
        """Returns what becomes of the trace at so many times its rate. Raises AssertionError if a request failed."""
        router = dataclasses.replace(PATIENT, long_prompts=LongPromptConfig(isolation=isolation))
        plan = SimPlan(self.prefill, self.prefill, profile=PROFILE, router=router)
        requests = [dataclasses.replace(each, at_s=each.at_s / rate) for each in self.trace]
        outcome = runner(plan)(self.policy, requests)
        assert not any(each.error for each in outcome.requests)
        return outcome

    def at_load(self) -> tuple[float, Outcome]:
        """Returns by how much arrivals are to be faster for prefill workers to be as busy as wanted without isolation,
        and what becomes of the trace then."""
        work_s = sum(map(_prefill_s, self.trace)) / self.prefill
        rate = self.busy * self.trace[-1].at_s / work_s  # if no cache saves anything
        outcome = self.run(rate, "off")
        for _ in range(_MORE_TRIES):
            if abs((busy := _prefill_busy(outcome)) - self.busy) <= _NEAR:
                break
            rate *= min(2.0, self.busy / busy)
            outcome = self.run(rate, "off")
        return rate, outcome


def cases(mooncake: Sequence[TracedRequest], azure: Sequence[TracedRequest]) -> list[Case]:
    """Returns the workloads; those of an empty trace are left out."""
    of_mooncake, of_azure = _cut(mooncake, 0, 1500), ((0, 2240), (6000, 2700), (12_000, 1730))
    found = (
        Case("6 % of 12,000 to 20,000 tokens", made_up(1500), 10_000, 4),
        Case("6 % of 12,000 to 20,000 tokens", made_up(1500), 10_000, 4, busy=0.9),
        Case("6 % of 12,000 to 20,000 tokens", made_up(1500), 10_000, 8),
        Case("Mooncake, first 1500", of_mooncake, 23_300, 4),
        Case("Mooncake, first 1500", of_mooncake, 23_300, 4, policy="prefix_aware"),
        *(Case(f"Azure, 2500 from number {start}", _cut(azure, start, 2500), short, 4) for start, short in of_azure),
    )
    return [case for case in found if case.trace]


def made_up(count: int) -> list[TracedRequest]:
    """Returns prompts of 200 to 800 tokens that come at random (Poisson), and 6 % of 12,000 to 20,000."""
    chance, at_s, made = random.Random(1), 0.0, []
    for _ in range(count):
        lengths = (12_000, 20_000) if chance.random() < 0.06 else (200, 800)
        made.append(TracedRequest(at_s, chance.randint(*lengths), _OUTPUT_TOKENS))
        at_s += chance.expovariate(16.0)
    return made


def compared(case: Case) -> Findings:
    """Returns the figures without and with isolation, and the one divided by the other."""
    rate, off = case.at_load()
    outcomes = {"off": off, "auto": case.run(rate, "auto")}
    found: Findings = [Figure(f"{case.what}: busy, off", "%", (100 * _prefill_busy(outcomes["off"]),))]
    figures = {isolation: _figures(case, outcome) for isolation, outcome in outcomes.items()}
    for name, (unit, off) in figures["off"].items():
        auto = figures["auto"][name][1]
        found += [
            Figure(f"  {name}, off", unit, (off,)),
            Figure(f"  {name}, auto", unit, (auto,)),
            Figure("    auto over off", "x", (auto / off,)),
        ]
    return found


def _figures(case: Case, outcome: Outcome) -> Mapping[str, tuple[str, float]]:
    """Returns unit and value of each figure by its name."""
    times_ms: dict[bool, list[float]] = {False: [], True: []}
    for each in outcome.requests:
        assert each.ttft_s is not None
        times_ms[each.prompt_tokens > case.short].append(1000 * each.ttft_s)
    found = {f"short p{percent}": ("ms", percentile(times_ms[False], percent)) for percent in (50, 95, 99)}
    found["long p95"] = ("ms", percentile(times_ms[True], 95))
    return found | {"served": ("requests/s", len(outcome.requests) / outcome.seconds)}


def _prefill_s(request: TracedRequest) -> float:
    num_tokens = request.prompt_tokens
    ms = num_tokens * PROFILE.ms_per_prefill_token + num_tokens**2 / 2 * PROFILE.ms_per_attended_token
    return ms / 1000


def _prefill_busy(outcome: Outcome) -> float:
    return statistics.mean(busy for name, busy in outcome.busy.items() if name.startswith("prefill"))


def _cut(trace: Sequence[TracedRequest], start: int, count: int) -> list[TracedRequest]:
    """Returns so many requests from the one of number `start` on, which comes at once."""
    found = trace[start : start + count]
    return [
        dataclasses.replace(each, at_s=each.at_s - found[0].at_s, output_tokens=min(each.output_tokens, _OUTPUT_TOKENS))
        for each in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_prompts", description=__doc__)
    parser.add_argument(
        "--trace", default="", help="Mooncake's (.jsonl) and Azure's conversations (.csv), with a comma between them"
    )
    parser.add_argument("--json", type=Path, default=Path("out/long-prompts.json"), help="the result file")
    arguments = parser.parse_args()
    traces: dict[str, list[TracedRequest]] = {".jsonl": [], ".csv": []}
    for path in filter(None, arguments.trace.split(",")):
        traces[Path(path).suffix] = list(read_trace(Path(path)))
    result = Result({"trace": arguments.trace})
    for case in cases(traces[".jsonl"], traces[".csv"]):
        result.show(compared(case))
    result.write(arguments.json)


if __name__ == "__main__":
    main()
