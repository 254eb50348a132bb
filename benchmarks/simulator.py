"""Measures the simulator itself: requests a minute on one core, and memory, with 32 workers.

`python -m benchmarks.simulator [--requests 100000] [--json FILE]`. Time is the process's own CPU time, so that a busy
machine measures the same; memory is the most that the process had.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

from benchmarks.figure import Figure, Findings
from benchmarks.result import Result
from services.sim.cluster import SimPlan, simulate
from services.sim.profile import WorkerProfile
from services.sim.trace import TracedRequest, synthetic_trace

_PROFILE = WorkerProfile(
    "made up",
    ms_per_prefill_token=0.1,
    ms_per_decode_step=20.0,
    ms_per_decode_sequence=0.3,
    ms_per_context_token=0.0005,
    num_blocks=8192,
    max_num_seqs=128,
    max_num_batched_tokens=2048,
    kv_bytes_per_token=100_000,
    transfer_bytes_per_s=1e10,
)
PLANS = {
    "10 prefill + 22 decode workers": SimPlan(10, 22, 0, profile=_PROFILE),
    "32 mixed workers": SimPlan(0, 0, 32, profile=_PROFILE),
}
_RATE = 40.0
"""Requests a second: both clusters are busy four fifths of the time or more."""


def _peak_mib() -> float:
    """Returns the most memory that was resident, in MiB. What getrusage says is the parent's too, after a fork."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def measure(num_requests: int, names: list[str]) -> Findings:
    trace: list[TracedRequest] = [
        dataclasses.replace(each, at_s=each.at_s / _RATE) for each in synthetic_trace(num_requests)
    ]
    found: Findings = []
    for name in names:
        began_s = time.process_time()
        outcome = simulate(PLANS[name], trace)
        took_s = time.process_time() - began_s
        failed = sum(bool(served.error) for served in outcome.requests)
        busy = sum(outcome.busy.values()) / len(outcome.busy)
        peak_mib = _peak_mib()
        found += [
            Figure(
                f"simulator: {name}, {num_requests} requests", "requests/min", (num_requests / took_s * 60,), ">= 50000"
            ),
            Figure("  CPU time", "s", (took_s,)),
            Figure("  virtual time", "s", (outcome.seconds,)),
            Figure("  workers compute", "%", (100 * busy,)),
            Figure("  requests that failed", "requests", (float(failed),)),
            Figure("  most memory of the process", "MiB", (peak_mib,)),
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument("--only", default=";".join(PLANS), help="some of the clusters, with semicolons")
    parser.add_argument("--json", type=Path, default=Path("out/simulator.json"), help="the result file")
    arguments = parser.parse_args()
    result = Result({name: value for name, value in vars(arguments).items() if name != "json"})
    result.add(measure(arguments.requests, arguments.only.split(";")))
    result.write(arguments.json)


if __name__ == "__main__":
    main()
