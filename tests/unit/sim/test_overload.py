"""Tests more load than a cluster in virtual time can serve, with deadlines: nothing disturbs these clocks."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from services.router.coordinator.config import CoordinatorConfig
from services.sim.cluster import SimPlan, simulate
from services.sim.profile import WorkerProfile
from services.sim.trace import TracedRequest
from tests.support.examples import combinations

PROMPT_TOKENS, OUTPUT_TOKENS = 200, 96
DEADLINE_S = 6.0
WARM_S, OVERLOAD_S = 8.0, 16.0
"""Costs and lengths are learnt from work, at 0.8 of the capacity; then comes too much."""
ROUTER = CoordinatorConfig(model_context_tokens=1 << 20, max_queue=24)
PROFILE = WorkerProfile(
    "test",
    ms_per_prefill_token=0.5,
    ms_per_decode_step=10.0,
    ms_per_decode_sequence=1.0,
    ms_per_context_token=0.0,
    kv_bytes_per_token=1000,
    transfer_bytes_per_s=1e8,
    max_num_seqs=32,
)
SLOW_PROMPTS = dataclasses.replace(PROFILE, ms_per_prefill_token=3.0)
SMALL_POOLS = dataclasses.replace(PROFILE, num_blocks=200)
CLUSTERS = {
    "decode is the limit": (SimPlan(2, 2, 0, profile=PROFILE, router=ROUTER), 0.02),
    "prefill is the limit": (SimPlan(2, 2, 0, profile=SLOW_PROMPTS, router=ROUTER), 0.02),
    "pools are the limit": (SimPlan(2, 2, 0, profile=SMALL_POOLS, router=ROUTER), 0.2),
    "mixed": (SimPlan(0, 0, 4, profile=PROFILE, router=ROUTER), 0.05),
}
"""Clusters, and how many may be late for each that is in time. Full pools preempt, and nobody foresees that."""


def capacity(plan: SimPlan) -> float:
    """Returns the requests a second that the cluster serves if as many as it likes wait."""
    patient = dataclasses.replace(plan, router=dataclasses.replace(ROUTER, max_queue=10_000, queue_timeout_s=1e9))
    outcome = simulate(patient, [TracedRequest(0.0, PROMPT_TOKENS, OUTPUT_TOKENS)] * 200)
    return 200 / outcome.seconds


def arrivals(rates: list[tuple[float, float]]) -> list[TracedRequest]:
    """Returns requests with deadlines, at random times (Poisson), at each rate a second until its time."""
    chance, at_s, trace = random.Random(5), 0.0, []
    for until_s, per_s in rates:
        while (at_s := at_s + chance.expovariate(per_s)) < until_s:
            trace.append(TracedRequest(at_s, PROMPT_TOKENS, OUTPUT_TOKENS, deadline_s=DEADLINE_S))
    return trace


@pytest.mark.parametrize(("name", "multiple"), combinations(tuple(CLUSTERS), [1.5, 3.0]))
def test_goodput_is_kept_and_few_are_late(name: str, multiple: float) -> None:
    plan, most_late = CLUSTERS[name]
    per_s = capacity(plan)
    outcome = simulate(plan, arrivals([(WARM_S, 0.8 * per_s), (WARM_S + OVERLOAD_S, multiple * per_s)]))
    asked = [each for each in outcome.requests if each.at_s >= WARM_S]
    good = [each for each in asked if each.total_s is not None]
    errors = Counter(each.error for each in asked if each.total_s is None)
    goodput = len(good) / (outcome.seconds - WARM_S)
    print(f"{goodput / per_s:.2f} of the capacity of {per_s:.1f}/s, {dict(errors)}")
    assert goodput >= 0.85 * per_s
    assert errors["DEADLINE_EXCEEDED"] <= most_late * len(good)
    assert set(errors) <= {"OVERLOADED", "DEADLINE_EXCEEDED"}


def test_a_cluster_that_begins_with_too_much_learns_what_it_can_do() -> None:
    """Nothing is known of outputs until the first is complete, and with too many at once none ever would be."""
    plan, _ = CLUSTERS["mixed"]
    outcome = simulate(plan, arrivals([(30.0, 3.0 * capacity(plan))]))
    late = [each for each in outcome.requests if each.at_s >= 15.0 and each.error == "DEADLINE_EXCEEDED"]
    good = [each for each in outcome.requests if each.at_s >= 15.0 and each.total_s is not None]
    assert len(good) > 150
    assert not late
