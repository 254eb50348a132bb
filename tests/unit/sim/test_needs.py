"""Tests that a search leaves out no cluster that could meet its goal: neither by how much work there is, nor by how
many workers of a phase are needed. Each bound is met by clusters that have just enough."""

from __future__ import annotations

import dataclasses

import pytest

from services.sim.cluster import SimPlan, simulate
from services.sim.goal import Goal
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
