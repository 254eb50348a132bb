"""Tests `baton plan`: the cheapest cluster that meets an objective, by trying them all, and what it says of others."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.cli import plan_cluster
from services.core.errors import ConfigError
from services.sim.cluster import Served, SimPlan, simulate
from services.sim.profile import WorkerProfile, write_profile
from services.sim.report import Objective, summary
from services.sim.search import Goal, Hopeless, Watch, search
from services.sim.trace import TracedRequest, synthetic_trace

PROFILE = WorkerProfile("cpu", 0.2, 10.0, 0.2)
TRACE = [dataclasses.replace(each, at_s=each.at_s / 6) for each in synthetic_trace(200)]
GOAL = Goal({"ttft_p95": 800.0, "itl_p99": 40.0})


def meets(plan: SimPlan) -> bool:
    return GOAL.margin(summary(plan, simulate(plan, TRACE), Objective(1.0, 1.0))) >= 0


def test_the_cheapest_is_found_as_by_trying_them_all() -> None:
    most = 5
    found = search(TRACE, PROFILE, None, GOAL, most)
    all_plans = [SimPlan(p, d, 0, profile=PROFILE) for p in range(1, most) for d in range(1, most - p + 1)]
    all_plans += [SimPlan(0, 0, m, profile=PROFILE) for m in range(1, most + 1)]
    all_plans += [
        SimPlan(p, d, m, profile=PROFILE)
        for p in range(1, most)
        for d in range(1, most - p)
        for m in range(1, most - p - d + 1)
    ]
    good = [plan for plan in all_plans if meets(plan)]
    assert found.best is not None
    assert found.best.plan.cost_per_hour == min(plan.cost_per_hour for plan in good)
    assert meets(found.best.plan)
    assert found.runner_up is not None
    assert found.runner_up.plan != found.best.plan
    assert meets(found.runner_up.plan)
    assert len(found.tried) < len(all_plans) / 2
    assert found.num_simulated < len(all_plans) * 2 / 3


@pytest.mark.parametrize("count", [1, 12])
def test_a_burst_may_be_served_after_the_last_arrival_as_late_as_the_bounds_allow(count: int) -> None:
    burst = [TracedRequest(number * 0.01, 1000, 50) for number in range(count)]
    found = search(burst, PROFILE, None, Goal({"ttft_p95": 30_000.0, "tpot_p95": 200.0}), 2)
    assert found.best is not None, "one worker does it, as simulating it shows"
    assert found.best.name == "1 mixed"
    hopeless = search(burst, PROFILE, None, Goal({"ttft_p50": 10.0}), 2)
    assert hopeless.best is None
    assert count == 1 or hopeless.num_simulated == 0, "the prompts alone take longer than bounds and arrivals"


def test_the_unsplit_alternative_costs_no_more() -> None:
    found = search(TRACE, PROFILE, None, GOAL, 6)
    assert found.best is not None
    assert found.unsplit is not None, "a split cluster is the cheapest here"
    assert found.unsplit.plan.cost_per_hour <= found.best.plan.cost_per_hour
    assert (found.unsplit.plan.prefill, found.unsplit.plan.decode) == (0, 0)
    assert found.unsplit.margin < 0, "a prompt's chunk takes longer than a gap between tokens may"


def run(tmp_path: Path, *arguments: str) -> int:
    path = tmp_path / "profile.json"
    write_profile(path, PROFILE)
    return plan_cluster.main(
        ["--profile", str(path), "--requests", "150", "--rate-scale", "6", *arguments], "baton plan"
    )


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slo = ["--slo", "ttft_p95=800ms,itl_p99=0.04s"]
    assert run(tmp_path, *slo) == 0
    printed = capsys.readouterr().out
    assert "cheapest   " in printed
    assert "runner-up  " in printed
    assert run(tmp_path, *slo, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["best"]["margin"] >= 0
    assert run(tmp_path, "--slo", "ttft_p50=0.001ms") == 1
    printed, progress = capsys.readouterr()
    assert "no cluster of at most 8 workers meets ttft_p50 <= 0.001 ms" in printed
    assert "nearest    " in printed
    assert "mixed: does not" in progress
    assert run(tmp_path, *slo, "--rate-scale", "1000") == 1
    printed = capsys.readouterr().out
    assert "(0 simulated)" in printed
    assert re.search(r"the work alone needs at least \d+ prefill and \d+ decode workers, or (\d+) mixed", printed)
    assert "nearest" not in printed


def test_what_the_best_does_with_more_work_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plan.svg"
    assert run(tmp_path, "--slo", "ttft_p95=800ms,itl_p99=0.04s", "--plot", str(plot)) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^rate \+20 % +\d", printed, re.MULTILINE)
    assert re.search(r"^prompts twice as long +\d", printed, re.MULTILINE)
    assert "Cost against attainment" in plot.read_text()
    assert "split, meets the objective" in plot.read_text()
    found = search(TRACE, PROFILE, None, GOAL, 6)
    assert found.best is not None
    faster = simulate(found.best.plan, [dataclasses.replace(each, at_s=each.at_s / 1.2) for each in TRACE])
    more = found.sensitivity["rate +20 %"]
    assert more.meets_it == (GOAL.margin(summary(found.best.plan, faster, GOAL.objective)) >= 0)


def test_why_splitting_does_not_pay_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Asks for so little that two mixed workers do, and one of each kind does not."""
    assert run(tmp_path, "--slo", "ttft_p95=1800ms,tpot_p95=80ms") == 0
    printed = capsys.readouterr().out
    assert re.search(r"^cheapest +\d mixed:", printed, re.MULTILINE)
    assert re.search(r"^split +1 prefill, 1 decode:", printed, re.MULTILINE)
    assert "splitting does not pay here: a split cluster for that money does worse" in printed
    assert "a chunk of a prompt stops streams for 102 ms on mixed workers, which no bound of itl forbids" in printed
    assert re.search(r"prompts are \d+% of the work", printed)


def test_a_hopeless_cluster_is_given_up_early_and_only_if_it_is_hopeless() -> None:
    for mixed in range(1, 5):
        plan = SimPlan(0, 0, mixed, profile=PROFILE)
        ended: list[Served] = []
        watch = Watch(GOAL, len(TRACE))

        def look(served: Served, ended: list[Served] = ended, watch: Watch = watch) -> None:
            ended.append(served)
            watch.look(served)

        given_up: Hopeless | None = None
        try:
            simulate(plan, TRACE, on_end=look)
        except Hopeless as hopeless:
            given_up = hopeless
        assert given_up is not None or mixed > 1
        if given_up is not None:
            assert not meets(plan)
            assert len(ended) < len(TRACE)
            figures = summary(plan, simulate(plan, TRACE), GOAL.objective)
            assert figures["attainment"] <= given_up.attainment


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--slo", "ttft=5ms"], "--slo: 'ttft=5ms' is not like ttft_p95=500ms"),
        (["--slo", "ttft_p42=5ms"], "--slo: 'ttft_p42=5ms'"),
        (["--slo", "ttft_p95=0ms"], "must be above 0"),
        (["--slo", "ttft_p95=5ms", "--cost", "mixed=1"], "--cost: 'mixed=1'"),
        (["--slo", "ttft_p95=5ms", "--max-workers", "0"], "--max-workers: 0 is not from 1 to 64"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(tmp_path, *arguments)
