"""Tests that a search leaves out no cluster that could meet its goal: neither by how much work there is, nor by how
many workers of a phase are needed. Each bound is met by clusters that have just enough."""

from __future__ import annotations

import dataclasses

import pytest

from services.sim.cluster import SimPlan, simulate
from services.sim.goal import Goal
from services.sim.needs import needs, out_of_reach
from services.sim.profile import WorkerProfile
from services.sim.report import summary
from services.sim.search import Candidate, search
from services.sim.trace import TracedRequest

PROFILE = WorkerProfile("even", 1.0, 10.0, 10.0, max_num_seqs=8, max_num_batched_tokens=512)
"""A sequence costs 10 ms in each step, whatever the batch, and a prompt token 1 ms: so work can be counted."""
BUSY = 0.97
"""So busy a worker is that has just enough to do."""


def prompts_for(num_workers: int) -> list[TracedRequest]:
    """Keeps so many workers busy with prompts of 500 tokens; each has two tokens of output."""
    every_s = 0.5 / BUSY / num_workers
    return [TracedRequest(number * every_s, 500, 2) for number in range(150 * num_workers)]


def outputs_for(num_workers: int) -> list[TracedRequest]:
    """Keeps so many workers busy with outputs of 50 tokens, 10 ms each; each has a prompt of 16 tokens."""
    every_s = 0.5 / BUSY / num_workers
    return [TracedRequest(number * every_s, 16, 51) for number in range(150 * num_workers)]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("of", ["prompts", "outputs"])
def test_workers_that_are_just_enough_are_tried(of: str, num_workers: int) -> None:
    trace = prompts_for(num_workers) if of == "prompts" else outputs_for(num_workers)
    goal = Goal({"ttft_p99": 1500.0, "tpot_p99": 100.0})
    plan = SimPlan(num_workers, 1, profile=PROFILE) if of == "prompts" else SimPlan(1, num_workers, profile=PROFILE)
    assert goal.margin(summary(plan, simulate(plan, trace), goal.objective)) >= 0, "they are enough"
    counted = search(trace, PROFILE, None, goal, 1).fewest
    fewest = counted.prefill if of == "prompts" else counted.decode
    assert fewest <= num_workers
    assert num_workers < 3 or fewest > 1, "the bound leaves out what is far too little"


MIXED_STEPS = dataclasses.replace(PROFILE, ms_per_decode_step=30.0, ms_per_prefill_token=0.1, mixed_factor=1.1)
FALLING = dataclasses.replace(PROFILE, prefill_points=((128, 58.2), (256, 51.7), (512, 100.0)))
GROWING = dataclasses.replace(PROFILE, prefill_points=((128, 50.0), (512, 150.0)), decode_points=((1, 9.0), (8, 30.0)))


@pytest.mark.parametrize("profile", [PROFILE, MIXED_STEPS, FALLING, GROWING])
@pytest.mark.parametrize("output", [1, 2, 30])
@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_what_is_out_of_reach_is_met_by_no_cluster(profile: WorkerProfile, output: int, rate: float) -> None:
    """Compares each bound with the times of a cluster of one, and of many workers: what a simulation meets is within
    reach, and what a request alone takes twice as long for is not."""
    trace = [TracedRequest(number / rate, 20 + 37 * number % 400, output) for number in range(40)]
    plans = [SimPlan(0, 0, 1, profile=profile), SimPlan(0, 0, 8, profile=profile), SimPlan(4, 4, profile=profile)]
    names = [f"{metric}_p{percent}" for metric in ("ttft", "tpot", "itl") for percent in (50, 95)]
    everything = Goal(dict.fromkeys(names, 1e9))
    for plan in plans:
        figures = summary(plan, simulate(plan, trace), everything.objective)
        met = {name: figures[f"{name[:-4]}_ms"][name[-3:]] * (1 + 1e-6) + 1e-6 for name in names}
        assert out_of_reach(trace, plan, Goal(met)) == {}
    told = out_of_reach(trace, plans[0], Goal(dict.fromkeys(names, 0.01)))
    assert (told == {}) == (profile is FALLING)
    assert any(name.startswith("tpot") for name in told) == (output > 1 and profile is not FALLING)


def test_which_prompt_a_bound_is_out_of_reach_for() -> None:
    trace = [TracedRequest(float(number), 100 + number, 2) for number in range(100)]
    told = out_of_reach(
        trace, SimPlan(0, 0, 1, profile=PROFILE), Goal({"ttft_p50": 148.9, "ttft_p95": 194.1, "itl_p50": 9.0})
    )
    assert told == {"ttft_p50": pytest.approx(149.0), "itl_p50": pytest.approx(10.0)}


def test_a_bound_of_two_metrics_is_counted_by_those_that_may_break_neither() -> None:
    """Half of the requests may be late for the first token and the other half for the others: nobody need do more."""
    trace = [TracedRequest(0.0, 16, 51)] * 100
    goal = Goal({"ttft_p50": 1e-3, "tpot_p50": 1e-3})
    assert needs(trace, SimPlan(1, 1, profile=PROFILE), goal).outputs < 5, "by the router's own patience alone"
    assert needs(trace, SimPlan(1, 1, profile=PROFILE), Goal({"ttft_p99": 1e-3, "tpot_p99": 1e-3})).outputs > 100


def test_a_long_prompt_may_begin_as_late_as_the_router_lets_it_wait() -> None:
    trace = [TracedRequest(0.0, 30_000, 2)] * 2
    slow = dataclasses.replace(PROFILE, ms_per_prefill_token=11.0)
    found = search(trace, slow, None, Goal({"ttft_p50": 400_000.0}), 1)
    assert found.best is not None


def test_what_more_work_means_is_what_it_says() -> None:
    """Simulates the two other workloads by hand: a rate that is 20 % higher, and prompts that are twice as long, as far
    as the context has room."""
    profile = dataclasses.replace(PROFILE, max_model_len=1500)
    trace = [TracedRequest(number * 0.9, 300 + 100 * (number % 8), 20) for number in range(40)]
    goal = Goal({"ttft_p95": 60_000.0, "tpot_p95": 1000.0})
    found = search(trace, profile, None, goal, 4)
    assert found.best is not None
    by_hand = {
        "rate +20 %": [dataclasses.replace(each, at_s=each.at_s / 1.2) for each in trace],
        "prompts twice as long": [
            dataclasses.replace(each, prompt_tokens=min(2 * each.prompt_tokens, 1480)) for each in trace
        ],
    }
    for name, other in by_hand.items():
        assert_same(found.sensitivity[name], found.best.plan, other, goal)
    margins = [found.best.margin, *(each.margin for each in found.sensitivity.values())]
    assert len(set(margins)) == 3, "each says something else"


def assert_same(candidate: Candidate, plan: SimPlan, trace: list[TracedRequest], goal: Goal) -> None:
    figures = summary(plan, simulate(plan, trace), goal.objective)
    assert candidate.meets_it == (goal.margin(figures) >= 0)
    assert candidate.margin == pytest.approx(goal.margin(figures))
