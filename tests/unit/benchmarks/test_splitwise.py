"""Tests the comparison with Splitwise: designs, arrivals, slowdowns, and the search for the highest rate."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import pytest

from benchmarks.splitwise import A100, DESIGNS, H100, H100_CAPPED, Bench, BoundBroken, Design, Slowdowns, arrivals
from services.sim.cluster import Served
from services.sim.profile import WorkerProfile
from services.sim.trace import TracedRequest

ALONE = WorkerProfile("a100", 1.0, 50.0, 0.0, prefill_points=((100, 100.0), (1000, 1000.0)))


def served(slower: float, *, error: str = "") -> Served:
    found = Served(0.0, 500, 11, ttft_s=0.5 * slower, total_s=None if error else (0.5 + 0.5) * slower, error=error)
    if error:
        found.ttft_s = None
    return found


def test_the_papers_budgets_are_kept() -> None:
    by_name = {design.name: design for design in DESIGNS}
    h100 = by_name["Baseline-H100"]
    for design in DESIGNS:
        within = design.cost / h100.cost if design.budget == "cost" else design.power / h100.power
        assert within <= 1.011, design
    assert by_name["Splitwise-AA"].cost / h100.cost == pytest.approx(0.81, abs=0.01), "20 % lower cost"


def test_a_percentile_is_compared_with_its_bound_and_given_up_when_it_must_be_broken() -> None:
    slowdowns = Slowdowns(ALONE, 100)
    for _ in range(100):
        slowdowns.add(served(1.2))
    ratio, name = slowdowns.worst()
    assert name == "E2E p50"
    assert ratio == pytest.approx(1.2 / 1.25)
    assert num_until_given_up(served(7.0)) == 3, "of a hundred, one may be beyond the bound of p99"
    assert num_until_given_up(served(1.0, error="OVERLOADED")) == 3


def num_until_given_up(each: Served) -> int:
    slowdowns = Slowdowns(ALONE, 100)
    for number in itertools.count(1):
        try:
            slowdowns.add(each)
        except BoundBroken:
            return number
    raise AssertionError


def test_arrivals_have_the_rate_and_the_lengths_of_the_trace() -> None:
    whole = [TracedRequest(0.0, 10, 1), TracedRequest(1.0, 20, 2)]
    found = arrivals(whole, 50.0, 100.0, seed=0)
    assert len(found) == pytest.approx(5000, rel=0.05)
    assert {(each.prompt_tokens, each.output_tokens) for each in found} == {(10, 1), (20, 2)}
    assert found == arrivals(whole, 50.0, 100.0, seed=0)


@pytest.mark.long
def test_the_highest_rate_is_found(tmp_path: Path) -> None:
    rows = ["model,hardware,prompt_size,batch_size,prompt_time,token_time,tensor_parallel"]
    for hardware, slower in ((A100, 1.0), (H100, 0.5), (H100_CAPPED, 0.6)):
        rows += [
            f"bloom-176b,{hardware},{size},{batch},{0.2 * size * batch * slower},{40 * slower},8"
            for size, batch in ((128, 1), (512, 1), (2048, 1), (512, 8))
        ]
    table, trace = tmp_path / "table.csv", tmp_path / "trace.csv"
    table.write_text("\n".join(rows) + "\n")
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,512,20\n")
    bench = Bench(argparse.Namespace(trace=trace, table=table, steps="tokens", chunked=False, seconds=10.0, seed=0))
    slow, fast = (
        bench.highest(Design("mixed", "power", 0, 0, 2, hardware, hardware), 1.0)[0] for hardware in (A100, H100)
    )
    assert 0 < slow < fast
    design = Design("mixed", "power", 0, 0, 2)
    assert bench.highest(design, 1.0, near=1.0)[0] == bench.highest(design, 1.0, near=2 * slow)[0] == slow
    assert (
        bench.run(Design("mixed", "power", 0, 0, 2), slow)[0]
        <= 1
        < bench.run(Design("m", "power", 0, 0, 2), slow + 1)[0]
    )
