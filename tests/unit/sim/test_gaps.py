"""Tests the gaps between the tokens of a stream: all of the time from its first token to its last is in them."""

from __future__ import annotations

import dataclasses
import math

import pytest

from services.sim.cluster import MESSAGE_S, Death, Outcome, SimPlan, simulate
from services.sim.profile import WorkerProfile
from services.sim.trace import TracedRequest, synthetic_trace

PROFILE = WorkerProfile("test", 0.1, 10.0, 1.0, 0.0, 0.001, kv_bytes_per_token=1000, transfer_bytes_per_s=1e7)
SMALL = dataclasses.replace(PROFILE, num_blocks=160, ms_per_prompt=7.0)
PLANS = {
    "split": SimPlan(1, 2, 0, profile=SMALL),
    "mixed": SimPlan(0, 0, 3, profile=SMALL),
    "all kinds": SimPlan(1, 1, 1, profile=SMALL),
    "whole on decode workers": SimPlan(0, 2, 0, profile=SMALL),
    "one host": SimPlan(1, 2, 0, profile=dataclasses.replace(SMALL, decode_beside_factor=1.5)),
}


def check(outcome: Outcome, *, rel: float) -> None:
    assert not any(served.error for served in outcome.requests)
    streamed_s = sum((served.total_s or 0.0) - (served.ttft_s or 0.0) for served in outcome.requests)
    assert sum(outcome.gaps_s.values()) == sum(served.output_tokens - 1 for served in outcome.requests)
    assert sum(gap_s * count for gap_s, count in outcome.gaps_s.items()) == pytest.approx(streamed_s, rel=rel)


@pytest.mark.parametrize(
    ("exact_ms", "noted_ms"), [(20.0, 20.0), (20.041, 20.05), (19.9999, 20.0), (0.12341, 0.1235), (1e-6, 1e-6)]
)
def test_a_gap_is_noted_as_no_shorter_than_it_was(exact_ms: float, noted_ms: float) -> None:
    """Streams at steps of a length that four digits hold, or do not: a bound that is kept is kept before rounding."""
    steps = dataclasses.replace(PROFILE, ms_per_decode_step=exact_ms, ms_per_context_token=0.0)
    outcome = simulate(SimPlan(0, 0, 1, profile=steps), [TracedRequest(0.0, 100, 50)])
    assert list(outcome.gaps_s) == [pytest.approx(noted_ms / 1e3, rel=1e-9)]


def test_the_gap_of_a_handoff_is_one() -> None:
    """Hands a prompt over whose blocks take a second: the second token comes so much later than the first."""
    slow = dataclasses.replace(PROFILE, transfer_bytes_per_s=1e6)
    outcome = simulate(SimPlan(1, 1, 0, profile=slow), [TracedRequest(0.0, 1000, 11)])
    check(outcome, rel=1e-3)
    assert max(outcome.gaps_s) > 0.9


def test_the_gap_of_a_death_is_one() -> None:
    plan = SimPlan(1, 2, 0, profile=PROFILE)
    dies = dataclasses.replace(plan, deaths=(Death("decode-0", 1.1),), cold_start_s=math.inf)
    outcome = simulate(dies, [TracedRequest(0.0, 500, 150)])
    check(outcome, rel=5e-3)
    assert max(outcome.gaps_s) > 0.06, "the prompt and its output were computed again"


@pytest.mark.parametrize("at_s", [0.0105 + 0.00017 * number for number in range(8)])
def test_what_a_worker_had_sent_before_its_death_arrives(at_s: float) -> None:
    """Takes steps that are shorter than a message's way: no token is lost, and one death is one failure."""
    quick = WorkerProfile("quick", 0.1, 0.1, 0.0)
    plan = SimPlan(0, 0, 2, profile=quick, deaths=(Death("mixed-0", at_s),), cold_start_s=1.0)
    outcome = simulate(plan, [TracedRequest(0.0, 100, 60)])
    (served,) = outcome.requests
    assert served.num_retries == 1
    assert sum(outcome.gaps_s.values()) == 59
    streamed_s = (served.total_s or 0.0) - (served.ttft_s or 0.0)
    # A death is seen at once, and what was under way with it.
    assert sum(gap_s * count for gap_s, count in outcome.gaps_s.items()) == pytest.approx(streamed_s, abs=MESSAGE_S)


@pytest.mark.parametrize("name", PLANS)
def test_gaps_add_up_to_the_times_of_streams(name: str) -> None:
    """Serves more than fits, so that handoffs wait and sequences are preempted."""
    trace = [
        TracedRequest(each.at_s / 5, min(each.prompt_tokens, 900), min(each.output_tokens, 300))
        for each in synthetic_trace(80)
    ]
    check(simulate(PLANS[name], trace), rel=2e-3)
