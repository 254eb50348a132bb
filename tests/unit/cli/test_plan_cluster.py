"""Tests `baton plan`: the cheapest cluster that meets an objective, by trying them all, and what it says of others."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.cli import plan_cluster
from services.core.errors import ConfigError
from services.router.policy import Selection, Split
from services.sim import plan_report
from services.sim import search as search_module
from services.sim.cluster import ROUTER, Served, SimPlan, simulate
from services.sim.goal import Goal, Hopeless, Watch
from services.sim.profile import WorkerProfile, write_profile
from services.sim.report import summary
from services.sim.search import search
from services.sim.trace import TracedRequest, synthetic_trace

pytestmark = pytest.mark.long

PROFILE = WorkerProfile("cpu", 0.2, 10.0, 0.2)
TRACE = [dataclasses.replace(each, at_s=each.at_s / 6) for each in synthetic_trace(200)]
GOAL = Goal({"ttft_p95": 800.0, "itl_p99": 40.0})


def meets(plan: SimPlan, goal: Goal = GOAL, trace: Sequence[TracedRequest] = TRACE) -> bool:
    try:
        outcome = simulate(plan, trace, on_end=Watch(goal, len(trace)).look)
    except Hopeless:
        return False
    return goal.margin(summary(plan, outcome, goal.objective)) >= 0


def all_plans(profile: WorkerProfile, of_decode: WorkerProfile | None, most: int) -> list[SimPlan]:
    """Returns the clusters that the search may try."""
    counts = [(p, d, 0) for p in range(1, most) for d in range(1, most - p + 1)]
    counts += [(0, 0, m) for m in range(1, most + 1)]
    counts += [(p, d, m) for p in range(1, most) for d in range(1, most - p) for m in range(1, most - p - d + 1)]
    return [SimPlan(*each, profile=profile, decode_profile=of_decode) for each in counts]


def test_the_cheapest_is_found_as_by_trying_them_all() -> None:
    most = 5
    found = search(TRACE, PROFILE, None, GOAL, most)
    every = all_plans(PROFILE, None, most)
    assert found.best is not None
    assert found.best.plan.cost_per_hour == min(plan.cost_per_hour for plan in every if meets(plan))
    assert meets(found.best.plan)
    assert found.runner_up is not None
    assert found.runner_up.plan != found.best.plan
    assert meets(found.runner_up.plan)
    assert len(found.tried) < len(every) / 2
    assert found.num_simulated < len(every) * 2 / 3


CHEAP = dataclasses.replace(PROFILE, cost_per_hour=0.2)
OTHERS = {
    "one host": (
        [TracedRequest(number // 4 * 13.0, 2000, 2) for number in range(60)],
        dataclasses.replace(PROFILE, prefill_beside_factor=1.5, decode_beside_factor=1.5),
        None,
        ROUTER,
        Goal({"ttft_p95": 1700.0, "tpot_p95": 30.0}),
    ),
    "a burst that fewer prefill workers spread": (
        [TracedRequest(0.0, 1000, 20)] * 20,
        dataclasses.replace(PROFILE, ms_per_decode_sequence=3.0),
        None,
        ROUTER,
        Goal({"ttft_p95": 60_000.0, "tpot_p95": 17.0}),
    ),
    "large batches are quicker": (
        [TracedRequest(0.1 * number, 50, 20) for number in range(60)],
        dataclasses.replace(PROFILE, decode_points=((1, 100.0), (8, 20.0), (64, 20.0))),
        None,
        ROUTER,
        Goal({"ttft_p95": 100.0, "tpot_p50": 50.0}),
    ),
    "outputs of two tokens": (
        [TracedRequest(0.0225 * number, 20, 2) for number in range(200)],
        dataclasses.replace(PROFILE, ms_per_decode_step=40.0, ms_per_decode_sequence=40.0, max_num_seqs=8),
        None,
        ROUTER,
        Goal({"ttft_p99": 200.0, "tpot_p99": 200.0}),
    ),
    "requests that fail have no tokens": (
        [
            TracedRequest(0.05 * number, 4000 if number % 4 == 0 else 100, 1 if number % 4 == 0 else 20)
            for number in range(40)
        ],
        dataclasses.replace(PROFILE, max_model_len=1024),
        None,
        ROUTER,
        Goal({"tpot_p95": 12.0}),
    ),
    "prefix caches": (
        [
            TracedRequest(0.5 * number, 2048, 150, tuple(range(number % 11 * 4, number % 11 * 4 + 4)))
            for number in range(60)
        ],
        PROFILE,
        None,
        dataclasses.replace(ROUTER, policy=Selection(["round_robin"]).of("").config),
        Goal({"ttft_p50": 150.0, "tpot_p95": 12.0}),
    ),
    "split auto": (
        [TracedRequest(number // 6 * 3.0, 1000, 2) for number in range(60)],
        PROFILE,
        None,
        dataclasses.replace(ROUTER, split=Split.AUTO),
        Goal({"ttft_p50": 800.0, "tpot_p95": 30.0}),
    ),
    "split never": (
        [TracedRequest(number / 27, 500, 2) for number in range(300)],
        PROFILE,
        CHEAP,
        dataclasses.replace(ROUTER, split=Split.NEVER),
        Goal({"ttft_p95": 700.0}),
    ),
}
"""Where more workers may make others slower, or where a phase is not done by its own workers alone."""


@pytest.mark.parametrize("name", OTHERS)
def test_the_cheapest_is_found_where_more_workers_may_be_worse(name: str) -> None:
    trace, profile, of_decode, router, goal = OTHERS[name]
    most = 5
    found = search(trace, profile, of_decode, goal, most, router=router)
    every = [dataclasses.replace(plan, router=router) for plan in all_plans(profile, of_decode, most)]
    good = [plan for plan in every if meets(plan, goal, trace)]
    assert 0 < len(good) < len(every)
    assert found.best is not None
    assert found.best.plan.cost_per_hour == min(plan.cost_per_hour for plan in good)


EVEN = [TracedRequest(number * 0.1, 200, 60) for number in range(150)]
QUICK = WorkerProfile("quick", 0.5, 5.0, 0.5, cost_per_hour=3.0)
SLOW = WorkerProfile("slow", 0.5, 150.0, 6.0, cost_per_hour=0.5)
MIDDLING = WorkerProfile("middling", 1.0, 40.0, 6.0, cost_per_hour=0.7)


@pytest.mark.parametrize(
    ("profile", "of_decode", "goal", "best"),
    [
        (QUICK, SLOW, Goal({"ttft_p95": 1000.0, "tpot_p50": 10.0}), "1 prefill, 1 decode, 1 mixed"),
        (QUICK, SLOW, Goal({"ttft_p95": 2000.0, "tpot_p95": 300.0}), "2 mixed"),
        (MIDDLING, QUICK, Goal({"ttft_p95": 1000.0, "tpot_p95": 40.0}), "2 prefill, 1 decode"),
    ],
)
def test_none_is_cheaper_where_decode_workers_have_a_profile_of_their_own(
    profile: WorkerProfile, of_decode: WorkerProfile, goal: Goal, best: str
) -> None:
    """Tries all that are cheaper. Mixed workers have the other profile: one may do what several decode workers do."""
    found = search(EVEN, profile, of_decode, goal, 3)
    assert found.best is not None
    assert found.best.name == best
    assert meets(found.best.plan, goal, EVEN)
    cheaper = [
        plan for plan in all_plans(profile, of_decode, 3) if plan.cost_per_hour < found.best.plan.cost_per_hour - 1e-9
    ]
    assert not [plan for plan in cheaper if meets(plan, goal, EVEN)]


def test_what_mixed_workers_need_is_counted_by_their_own_profile() -> None:
    """Gives the search decode workers that are so slow that two are needed where one mixed worker is enough."""
    trace = [TracedRequest(number * 0.1, 200, 100) for number in range(200)]
    goal = Goal({"ttft_p95": 2000.0, "tpot_p95": 300.0})
    found = search(trace, dataclasses.replace(QUICK, ms_per_prefill_token=0.05), SLOW, goal, 4)
    assert found.best is not None
    assert found.best.name == "1 mixed"
    assert found.fewest.decode == 2
    assert found.fewest.mixed == 1


@pytest.mark.parametrize("count", [1, 12])
def test_a_burst_may_be_served_after_the_last_arrival_as_late_as_the_bounds_allow(count: int) -> None:
    burst = [TracedRequest(number * 0.01, 1000, 50) for number in range(count)]
    found = search(burst, PROFILE, None, Goal({"ttft_p95": 30_000.0, "tpot_p95": 200.0}), 2)
    assert found.best is not None, "one worker does it, as simulating it shows"
    assert found.best.name == "1 mixed"
    hopeless = search(burst, PROFILE, None, Goal({"ttft_p50": 10.0}), 2)
    assert hopeless.best is None
    assert count == 1 or hopeless.num_simulated == 0, "the prompts alone take longer than bounds and arrivals"


def test_how_many_clusters_were_not_tried_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks for what no cluster does, though its bounds of each phase leave several of all three kinds."""
    goal = Goal({"ttft_p95": 4000.0, "tpot_p95": 150.0})
    for most_of_all_kinds, is_said in ((1, True), (12, False)):
        monkeypatch.setattr(search_module, "_MOST_OF_ALL_KINDS", most_of_all_kinds)
        found = search(EVEN, MIDDLING, SLOW, goal, 4)
        of_all_kinds = [each for each in found.tried if each.plan.prefill and each.plan.mixed]
        assert len(of_all_kinds) + found.num_untried == 4
        assert plan_report.plain(found)["num_untried"] == found.num_untried
        line = f"not tried: {found.num_untried} more clusters of prefill, decode and mixed workers together"
        assert (line in plan_report.text(found, goal, 4)) == is_said


def test_a_request_that_fails_is_late_and_no_more() -> None:
    """Adds one that no worker can hold to a hundred others: with p95, five may be late."""
    profile = dataclasses.replace(PROFILE, max_model_len=2048)
    trace = [TracedRequest(float(number), 200, 20) for number in range(100)]
    trace.append(TracedRequest(100.0, 4000, 20))
    goal = Goal({"ttft_p95": 2000.0, "tpot_p95": 100.0, "itl_p95": 100.0, "queue_p95": 1000.0})
    found = search(trace, profile, None, goal, 1)
    assert found.best is not None
    assert re.search(r", failed: 1 [A-Z_]+, 99\.0% of requests within", plan_report.text(found, goal, 1))
    for name in ("ttft_p99", "tpot_p99", "itl_p99", "queue_p99"):
        assert search(trace[-60:], profile, None, Goal({name: 5000.0}), 1).best is None, name


def test_which_bounds_a_request_is_counted_by_is_said() -> None:
    """Lets ten come at once: some have to wait in the router's queue, since leases hold half of the pool at most."""
    few = dataclasses.replace(PROFILE, num_blocks=64, max_model_len=1024)
    burst = [TracedRequest(0.0, 400, 20)] * 10
    queued = Goal({"queue_p50": 100.0})
    found = search(burst, few, None, queued, 1)
    assert found.nearest is not None
    assert found.nearest.figures is not None
    assert 0 < found.nearest.attainment < 1
    assert "% of requests within the bounds, " in plan_report.text(found, queued, 1)
    gaps = Goal({"ttft_p95": 1e6, "itl_p99": 1e-3})
    assert "100.0% of requests within the bounds (but itl), does not" in plan_report.text(
        search(burst, few, None, gaps, 1), gaps, 1
    )


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
    written = tmp_path / "plan.json"
    assert run(tmp_path, *slo, "--json", str(written)) == 0
    assert "cheapest   " in capsys.readouterr().out
    assert json.loads(written.read_text()) == found
    assert run(tmp_path, "--slo", "ttft_p50=0.001ms") == 1
    printed, progress = capsys.readouterr()
    assert "no cluster of at most 8 workers meets ttft_p50 <= 0.001 ms" in printed
    assert re.search(r"ttft_p50 <= 0.001 ms is out of reach, .*: a prompt of their p50 length takes \d+ ms on", printed)
    assert "the work alone needs" not in printed, "more workers are no help"
    assert "nearest    " in printed
    assert "mixed: does not" in progress
    assert run(tmp_path, *slo, "--rate-scale", "1000", "--plot", str(tmp_path / "none.svg")) == 1
    printed, progress = capsys.readouterr()
    assert "--plot: nothing was simulated" in progress
    assert not (tmp_path / "none.svg").exists()
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
        (["--slo", "ttft_p095=5ms"], "--slo: 'ttft_p095=5ms' is not like"),
        (["--slo", "ttft_p٩٥=5ms"], "is not like"),
        (["--slo", "ttft_p95=0ms"], "must be above 0"),
        (["--slo", f"ttft_p95={'9' * 400}ms"], "at most a thousand million seconds"),
        (["--slo", "ttft_p95=5ms,ttft_p95=9ms"], "--slo: ttft_p95 has two bounds"),
        (["--slo", "ttft_p95=5ms", "--cost", "mixed=1"], "--cost: 'mixed=1'"),
        (["--slo", "ttft_p95=5ms", "--cost", "decode=1,decode=2"], "--cost: decode has two costs"),
        (["--slo", "ttft_p95=5ms", "--max-workers", "0"], "--max-workers: 0 is not from 1 to 64"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(tmp_path, *arguments)


def test_json_has_null_where_there_is_no_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--slo", "ttft_p95=5s", "--requests", "20", "--rate-scale", "0.1", "--max-workers", "2", "--json"]
    assert run(tmp_path, *asked) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["best"]["figures"]["objective_ms"] == {"ttft": 5000.0, "tpot": None}
