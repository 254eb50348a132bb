"""Tests presets in the scenarios of `benchmarks/routing.py`, in virtual time, and the flags that choose them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.routing import PROFILE, SCENARIOS
from services.cli import plan_cluster, simulate
from services.core.errors import ConfigError
from services.router.policy import PRESETS
from services.sim.cluster import SimPlan
from services.sim.cluster import simulate as run
from services.sim.profile import WorkerProfile, write_profile
from services.sim.trace import TracedRequest


def test_every_preset_has_a_scenario() -> None:
    assert set(SCENARIOS) == set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_loses_a_request_in_its_scenario(preset: str) -> None:
    """How much better it is there than the others is a result: `benchmarks/results/2026-11-28-routing.json`. The run
    itself asserts that no request failed."""
    scenario = SCENARIOS[preset](1)
    assert scenario.run(preset) > 0


def test_round_robin_serves_all_workers_alike_where_others_send_all_to_one() -> None:
    """Lets requests come one by one, so that every worker is at rest: only their names tell them apart."""
    scenario = dataclasses.replace(SCENARIOS["round_robin"](1), plan=SimPlan(4, 1, profile=PROFILE))
    scenario = dataclasses.replace(scenario, trace=[TracedRequest(float(number), 500, 2) for number in range(40)])
    busy = {}
    for preset in ("round_robin", "pressure"):
        router = dataclasses.replace(scenario.plan.router, policy=PRESETS[preset])
        outcome = run(dataclasses.replace(scenario.plan, router=router), scenario.trace)
        busy[preset] = [outcome.busy[f"prefill-{number}"] for number in range(4)]
    assert max(busy["round_robin"]) == pytest.approx(min(busy["round_robin"]))
    assert busy["pressure"][1:] == [0.0] * 3


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_lets_streams_pile_up_on_some_of_the_mixed_workers(preset: str) -> None:
    """Lets short prompts with long outputs come so seldom that none waits for another: a sequence stays where its
    prompt ran, so the choice for the prompt must look at what the workers decode."""
    profile = WorkerProfile("t", ms_per_prefill_token=0.05, ms_per_decode_step=10.0, ms_per_decode_sequence=1.0)
    trace = [TracedRequest(number / 8, 50 + 7 * number % 100, 100 + 61 * number % 200) for number in range(200)]
    slowest_s = {}
    for name in (preset, "least_loaded"):
        plan = SimPlan(0, 0, 4, profile=profile)
        plan = dataclasses.replace(plan, router=dataclasses.replace(plan.router, policy=PRESETS[name]))
        times_s = sorted(served.tpot_s or 0.0 for served in run(plan, trace).requests)
        slowest_s[name] = times_s[len(times_s) * 95 // 100]
    assert slowest_s[preset] < 1.15 * slowest_s["least_loaded"]


def test_a_worker_slower_than_it_reports_takes_longer_and_says_the_same() -> None:
    trace = [TracedRequest(0.0, 500, 21)]
    plan = SimPlan(0, 0, 1, profile=PROFILE)
    slow = dataclasses.replace(plan, unreported=(("mixed-0", 3.0),))
    totals_s = [run(each, trace).requests[0].total_s or 0.0 for each in (plan, slow)]
    assert totals_s[1] == pytest.approx(3 * totals_s[0], rel=0.01)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    write_profile(tmp_path / "profile.json", PROFILE)
    return ["--profile", str(tmp_path / "profile.json"), "--requests", "60", "--rate-scale", "8"]


def test_the_flags_of_simulate(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for name, more in {
        "default": [],
        "pressure": ["--policy", "pressure"],
        "in turn": ["--policy", "round_robin"],
        "declared": ["--policy", "weighted", "--capacity", "mixed-1=8"],
        "changed": ["--policy", "round_robin", "--policy-weight", "prefill.least_recent=0"],
    }.items():
        assert simulate.main([*flags, "--mixed", "3", "--json", "-", *more], "baton simulate") == 0
        found[name] = json.loads(capsys.readouterr().out)
    assert found["default"] == found["pressure"]
    busy = {name: [figures["busy"][f"mixed-{number}"] for number in range(3)] for name, figures in found.items()}
    assert len({tuple(shares) for shares in busy.values()}) == 4
    assert busy["declared"][1] == max(busy["declared"])
    assert busy["changed"][0] > 1.5 * busy["in turn"][0], "without the term, the first one gets all that fits"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["--policy", "robin"], "--policy: 'robin' is not one of round_robin, "),
        (["--policy-weight", "near=1"], "--policy-weight: 'near=1' is not like "),
    ],
)
def test_a_wrong_flag_is_named_by_simulate_and_plan(flags: list[str], wrong: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        simulate.main([*flags, *wrong], "baton simulate")
    with pytest.raises(ConfigError, match=why):
        plan_cluster.main([*flags, "--slo", "ttft_p95=1s", *wrong], "baton plan")
    with pytest.raises(ConfigError, match="--policy: --ablations has clusters of its own"):
        simulate.main([*flags, "--mixed", "2", "--ablations", "--policy", "sticky"], "baton simulate")
    with pytest.raises(ConfigError, match="--capacity: 'x=1' names no worker"):
        simulate.main([*flags, "--mixed", "2", "--capacity", "x=1"], "baton simulate")


def test_plan_searches_with_the_policy(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Demands what least loaded workers keep and a policy without terms, by which the first gets all, does not."""
    command = [*flags, "--slo", "ttft_p95=4s", "--max-workers", "3", "--json"]
    plan_cluster.main([*command, "--policy", "least_loaded"], "baton plan")
    found = json.loads(capsys.readouterr().out)
    nothing = [part for term in ("least_recent", "trusted") for part in ("--policy-weight", f"prefill.{term}=0")]
    plan_cluster.main([*command, "--policy", "round_robin", *nothing], "baton plan")
    other = json.loads(capsys.readouterr().out)
    margins = [{tuple(each["workers"].values()): each["margin"] for each in plans["tried"]} for plans in (found, other)]
    shared = [workers for workers in margins[0].keys() & margins[1].keys() if workers[2] > 1]
    assert any(margins[0][workers] != margins[1][workers] for workers in shared)
