"""Tests what one slow worker does to a simulated cluster, and what its ejection saves."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from services.router.policy.outliers import OutlierConfig
from services.sim.cluster import Outcome, SimPlan, simulate
from services.sim.profile import WorkerProfile
from services.sim.report import Objective, summary, text
from services.sim.trace import TracedRequest

PROFILE = WorkerProfile(
    "test",
    ms_per_prefill_token=0.2,
    ms_per_decode_step=20.0,
    ms_per_decode_sequence=0.5,
    kv_bytes_per_token=1000,
    transfer_bytes_per_s=1e9,
    max_num_seqs=32,
)
OBJECTIVE = Objective(1.0, 0.1)
EJECTS, NEVER = OutlierConfig(slow_factor=2.0), OutlierConfig(slow_factor=0.0)


def trace(rate: float = 8.0, seconds: float = 90.0) -> list[TracedRequest]:
    chance, at_s, requests = random.Random(7), 0.0, []
    while at_s < seconds:
        requests.append(TracedRequest(at_s, chance.randint(200, 1800), chance.randint(50, 150)))
        at_s += chance.expovariate(rate)
    return requests


def times(plan: SimPlan, *, from_s: float = 20.0) -> dict[str, float]:
    """Returns p95 of what was served after the time in which a slow worker is found."""
    outcome = simulate(plan, trace())
    assert not any(each.error for each in outcome.requests)
    later: dict[str, Any] = summary(plan, _after(outcome, from_s), OBJECTIVE)
    return {name: later[name]["p95"] for name in ("ttft_ms", "tpot_ms")}


def _after(outcome: Outcome, from_s: float) -> Outcome:
    return dataclasses.replace(outcome, requests=[each for each in outcome.requests if each.at_s >= from_s])


@pytest.mark.parametrize(
    ("plan", "without", "slow"),
    [
        (SimPlan(4, 3, 0, profile=PROFILE), SimPlan(3, 3, 0, profile=PROFILE), "prefill-0"),
        (SimPlan(3, 4, 0, profile=PROFILE), SimPlan(3, 3, 0, profile=PROFILE), "decode-0"),
        (SimPlan(0, 0, 4, profile=PROFILE), SimPlan(0, 0, 3, profile=PROFILE), "mixed-0"),
    ],
    ids=["prefill", "decode", "mixed"],
)
def test_it_is_nearly_as_if_the_slow_worker_were_not_there(plan: SimPlan, without: SimPlan, slow: str) -> None:
    plan = dataclasses.replace(plan, slowness=((slow, 4.0),))
    ejects, lets_be = (times(_with(plan, outliers)) for outliers in (EJECTS, NEVER))
    best = times(without)
    for figure in ("ttft_ms", "tpot_ms"):
        assert ejects[figure] < 1.1 * best[figure]
    figure = "ttft_ms" if slow == "prefill-0" else "tpot_ms"
    assert lets_be[figure] > 1.5 * best[figure]


def _with(plan: SimPlan, outliers: OutlierConfig) -> SimPlan:
    return dataclasses.replace(plan, router=dataclasses.replace(plan.router, outliers=outliers))


LONG = dataclasses.replace(
    PROFILE,
    ms_per_prefill_step=5.0,
    ms_per_prefill_token=0.02,
    ms_per_attended_token=2e-6,
    ms_per_decode_step=5.0,
    ms_per_context_token=0.001,
    num_blocks=32768,
    max_model_len=131072,
    max_num_batched_tokens=2048,
)
"""Workers whose steps take long for what they attend to: sixteen streams of 2,000 tokens 45 ms, two of 100,000 205."""


def mixed_lengths(seconds: float = 30.0) -> list[TracedRequest]:
    """Returns prompts of 1500 to 2500 tokens, and now and then one of 100,000 with a long output."""
    chance, at_s, requests = random.Random(3), 0.0, []
    while at_s < seconds:
        requests.append(TracedRequest(at_s, chance.randint(1500, 2500), chance.randint(50, 150)))
        at_s += chance.expovariate(5.0)
    requests += [TracedRequest(at_s, 100_000, 200) for at_s in (2.0, 2.5, 12.0)]
    return sorted(requests, key=lambda each: each.at_s)


@pytest.mark.parametrize(
    ("plan", "slow"),
    [(SimPlan(5, 4, 0, profile=LONG), "decode-1"), (SimPlan(0, 0, 6, profile=LONG), "mixed-1")],
    ids=["split", "mixed"],
)
def test_long_contexts_are_no_slowness_and_a_slow_worker_among_them_is_found(plan: SimPlan, slow: str) -> None:
    plan, trace = _with(plan, EJECTS), mixed_lengths()
    assert simulate(plan, trace).ejections == []
    outcome = simulate(dataclasses.replace(plan, unreported=((slow, 4.0),)), trace)
    assert outcome.ejections
    assert {each.worker_id for each in outcome.ejections} == {slow}


@pytest.mark.parametrize("slow", ["prefill-0", "decode-0"])
def test_a_worker_slower_than_its_profile_says_is_found_by_its_steps(slow: str) -> None:
    plan = _with(SimPlan(4, 4, 0, profile=PROFILE, unreported=((slow, 4.0),)), EJECTS)
    outcome = simulate(plan, trace())
    (first, *_) = outcome.ejections
    assert (first.worker_id, first.at_s < 20.0) == (slow, True)
    figures = summary(plan, outcome, OBJECTIVE)
    assert f"slow  {slow} at {first.at_s:.0f} s: ejected for 30 s: " in text(figures)
