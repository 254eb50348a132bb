"""Tests the order in which a simulated cluster serves: what it brings, and that nobody starves by it."""

from __future__ import annotations

import dataclasses
import random
import statistics

import pytest

from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.output_lengths import OutputLengths
from services.sim.cluster import Served, SimPlan, simulate
from services.sim.profile import WorkerProfile
from services.sim.trace import TracedRequest

PROFILE = WorkerProfile(
    "test", ms_per_prefill_token=0.05, ms_per_decode_step=10.0, ms_per_decode_sequence=0.5, max_num_seqs=8
)
AGING_S = 10.0
PLAN = SimPlan(
    profile=PROFILE,
    asked_tokens=1000,
    router=CoordinatorConfig(model_context_tokens=1 << 20, queue_timeout_s=1e9, aging_s=AGING_S),
)


def mixed_workload(rate: float, num_requests: int = 200) -> list[TracedRequest]:
    """Returns requests of two kinds, whose outputs are short or long; prompts of the second are a little longer."""
    chance = random.Random(1)
    at_s, requests = 0.0, []
    for _ in range(num_requests):
        prompt, output = ((150, 250), (300, 500)) if chance.random() < 0.2 else ((100, 127), (10, 30))
        requests.append(TracedRequest(at_s, chance.randint(*prompt), chance.randint(*output)))
        at_s += chance.expovariate(rate)
    return requests


def seconds(requests: list[Served], *, short: bool | None = None) -> list[float]:
    assert not any(served.error for served in requests)
    chosen = [served for served in requests if short is None or (served.output_tokens < 100) == short]
    return [served.total_s for served in chosen if served.total_s is not None]


@pytest.mark.long
def test_what_is_expected_to_be_short_goes_first_and_the_mean_wait_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says how long the outputs will be: that is learnt of each kind, while the workload runs."""
    trace = mixed_workload(rate=14.0, num_requests=300)
    small = dataclasses.replace(PROFILE, num_blocks=200, max_num_seqs=64, max_model_len=2048)
    plan = dataclasses.replace(PLAN, profile=small, asked_tokens=600)  # so prompts wait in the router
    learnt = simulate(plan, trace).requests
    monkeypatch.setattr(OutputLengths, "median_like", lambda *_: None)
    by_arrival = simulate(plan, trace).requests
    assert statistics.mean(seconds(learnt)) < 0.75 * statistics.mean(seconds(by_arrival))
    assert statistics.mean(seconds(learnt, short=True)) < 0.7 * statistics.mean(seconds(by_arrival, short=True))
    assert max(seconds(learnt)) <= max(seconds(by_arrival)) + AGING_S, "the long ones do not starve"
    assert statistics.mean(seconds(learnt, short=False)) < 1.2 * statistics.mean(seconds(by_arrival, short=False))


@pytest.mark.long
def test_a_stream_of_high_priority_above_the_capacity_starves_nobody() -> None:
    """A mixed worker gets more high priorities than it can serve, for a minute. Whoever came with a low one is served
    while they still come."""
    chance = random.Random(2)
    high = [TracedRequest(number / 12, chance.randint(3000, 5000), 4, priority=5) for number in range(720)]
    low = [TracedRequest(5.0 + 5.0 * number, 4000, 4) for number in range(6)]
    plan = SimPlan(0, 0, 1, profile=PROFILE, router=PLAN.router)
    requests = simulate(plan, sorted(high + low, key=lambda each: each.at_s)).requests
    waits = [served.ttft_s for served in requests if not served.priority and served.ttft_s is not None]
    assert len(waits) == len(low)
    assert max(waits) < 2 * AGING_S + 5.0, "it waits in the router and at the worker, long in each"
    assert statistics.mean(waits) > AGING_S, "high priorities go first"
    assert max(served.ttft_s or 0.0 for served in requests if served.priority) > 20.0, "it is more than it can serve"
