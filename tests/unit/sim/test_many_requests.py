"""Tests that many requests take bounded memory: what a request needs while it lives is gone when it has ended."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from services.sim.cluster import SimPlan, simulate
from services.sim.profile import WorkerProfile
from services.sim.trace import TracedRequest, synthetic_trace
from tests.support import ROOT

pytestmark = pytest.mark.long

PROFILE = WorkerProfile(
    "test",
    ms_per_prefill_token=0.1,
    ms_per_decode_step=20.0,
    ms_per_decode_sequence=0.3,
    num_blocks=8192,
    max_num_seqs=128,
    max_num_batched_tokens=2048,
)
PLAN = SimPlan(10, 22, 0, profile=PROFILE)


def many(count: int) -> list[TracedRequest]:
    """Returns requests that begin alike, so that caches are full throughout, forty a second."""
    return [
        dataclasses.replace(each, at_s=each.at_s / 40, block_ids=(number % 500, number), block_tokens=256)
        for number, each in enumerate(synthetic_trace(count))
    ]


def bytes_kept_and_peak(trace: list[TracedRequest]) -> tuple[int, int]:
    """Returns how much memory the outcome takes, and how much there was at most while simulating."""
    tracemalloc.start()
    try:
        outcome = simulate(PLAN, trace)
        gc.collect()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(outcome.requests) == len(trace)
    assert all(served.total_s is not None for served in outcome.requests)
    return kept, peak


def check(count: int) -> None:
    trace = many(count)
    kept, peak = bytes_kept_and_peak(trace)
    assert kept < 500 * count, f"{kept / count:.0f} bytes a request"
    assert peak - kept < 64 << 20, f"{(peak - kept) >> 20} MiB beside what is kept"


def test_two_thousand_requests() -> None:
    check(2_000)


@pytest.mark.timeout(1500)
def test_a_hundred_thousand_requests(tmp_path: Path) -> None:
    """Runs them in a process of its own, whose memory is that of the trace and the outcome."""
    result = tmp_path / "result.json"
    command = ["-m", "benchmarks.simulator", "--requests", "100000", "--only", "10 prefill + 22 decode workers"]
    subprocess.run([sys.executable, *command, "--json", str(result)], cwd=ROOT, check=True, capture_output=True)
    figures = {each["name"].strip(): each["median"] for each in json.loads(result.read_text())["figures"]}
    assert figures["requests that failed"] == 0
    assert figures["most memory of the process"] < 160, "MiB"
