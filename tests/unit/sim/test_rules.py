"""Tests the other ways of computing that Baton's is compared with: static batching, and prompts in one step."""

from __future__ import annotations

import dataclasses
import math

import pytest

from services.sim.cluster import MESSAGE_S, SimPlan, simulate
from services.sim.profile import WorkerProfile
from services.sim.report import Objective, summary
from services.sim.scheduler import WorkerRules
from services.sim.trace import TracedRequest, synthetic_trace

PROFILE = WorkerProfile("test", ms_per_prefill_token=0.1, ms_per_decode_step=10.0, ms_per_decode_sequence=1.0)
ONE = SimPlan(0, 0, 1, profile=PROFILE)
STATIC, WHOLE = WorkerRules(static=True), WorkerRules(chunked=False)


def test_a_static_batch_keeps_its_size_until_its_last_sequence_ends() -> None:
    trace = [TracedRequest(0.0, 100, output) for output in (1, 50, 100)]
    trace.append(TracedRequest(0.01, 100, 2))
    plan = dataclasses.replace(SimPlan(0, 1, 0, profile=PROFILE), rules=STATIC)
    first, second, third, late = simulate(plan, trace).requests
    # The first was alone when it came, and is a batch of its own; the others wait for it.
    assert first.total_s == pytest.approx(0.01 + 2 * MESSAGE_S)
    assert second.total_s is not None
    assert third.total_s is not None
    assert late.total_s is not None
    start_s = 0.01 + MESSAGE_S
    prompts_s = 0.02
    assert second.total_s == pytest.approx(start_s + prompts_s + 49 * 0.011 + MESSAGE_S)
    assert third.total_s == pytest.approx(start_s + prompts_s + 99 * 0.011 + MESSAGE_S), "steps of two for both"
    assert late.at_s + late.total_s > third.total_s


def test_nobody_is_handed_over_into_a_static_batch() -> None:
    """Hands three prompts over to one worker: two come while it computes the first, and are a batch after it."""
    plan = dataclasses.replace(SimPlan(3, 1, 0, profile=PROFILE), rules=STATIC)
    trace = [TracedRequest(0.0, 100, 101), TracedRequest(0.1, 100, 21), TracedRequest(0.15, 100, 11)]
    outcome = simulate(plan, trace)
    first, second, third = (served.at_s + (served.total_s or math.inf) for served in outcome.requests)
    assert second == pytest.approx(first + 20 * 0.011, abs=0.003)
    assert third == pytest.approx(first + 10 * 0.011, abs=0.003), "each step is one of two"
    joined = simulate(dataclasses.replace(plan, rules=WorkerRules()), trace)
    assert (joined.requests[1].total_s or math.inf) < 0.3, "it joins where batching is continuous"


def test_a_static_batch_that_was_preempted_makes_room_for_the_next_at_once() -> None:
    """Lets a handoff hold the blocks that the only running sequence needs to grow."""
    small = dataclasses.replace(PROFILE, num_blocks=20, max_model_len=300)
    plan = SimPlan(1, 1, 0, profile=small, rules=STATIC)
    outcome = simulate(plan, [TracedRequest(0.0, 60, 200), TracedRequest(0.3, 120, 30)])
    assert outcome.num_preemptions == 1
    assert all((served.total_s or math.inf) < 3.0 for served in outcome.requests)


def test_continuous_batching_serves_several_times_more_at_saturation() -> None:
    crowd = [dataclasses.replace(each, at_s=each.at_s / 1000) for each in synthetic_trace(300)]
    rates = [
        summary(plan, simulate(plan, crowd), Objective(1.0, 1.0))["output_tokens_per_s"]
        for plan in (ONE, dataclasses.replace(ONE, rules=STATIC))
    ]
    assert rates[0] > 1.5 * rates[1]


def test_a_prompt_in_one_step_stops_every_stream_for_its_whole_length() -> None:
    trace = [TracedRequest(0.0, 10, 200), TracedRequest(0.5, 4000, 2)]
    gaps = [max(simulate(dataclasses.replace(ONE, rules=rules), trace).gaps_s) for rules in (WorkerRules(), WHOLE)]
    assert gaps[0] == pytest.approx(0.0511, rel=0.05), "a chunk of 511 tokens, and a decode"
    assert gaps[1] == pytest.approx(0.4, rel=0.01)


def test_prompts_share_a_step_only_within_its_limit() -> None:
    """Queues three prompts behind one; the limit of 512 tokens lets the first two of them run together."""
    plan = dataclasses.replace(SimPlan(0, 1, 0, profile=PROFILE), rules=WHOLE)
    trace = [TracedRequest(0.0, 1000, 1), *(TracedRequest(0.01, 250, 1) for _ in range(3))]
    ends = [served.at_s + served.total_s for served in simulate(plan, trace).requests if served.total_s is not None]
    assert ends == pytest.approx(
        [0.1 + 2 * MESSAGE_S, 0.15 + 2 * MESSAGE_S, 0.15 + 2 * MESSAGE_S, 0.175 + 2 * MESSAGE_S]
    )


@pytest.mark.parametrize("rules", [STATIC, WHOLE, WorkerRules(static=True, chunked=False)])
@pytest.mark.parametrize(
    "counts",
    [(1, 1, 1), *(pytest.param(counts, marks=pytest.mark.long) for counts in ((1, 2, 0), (0, 0, 3), (0, 2, 0)))],
)
def test_every_request_ends_once(rules: WorkerRules, counts: tuple[int, int, int]) -> None:
    """Simulates small pools under both rules; `simulate` itself checks that nothing is left."""
    small = dataclasses.replace(PROFILE, num_blocks=160)
    trace = [
        TracedRequest(each.at_s / 10, min(each.prompt_tokens, 900), min(each.output_tokens, 300))
        for each in synthetic_trace(150)
    ]
    plan = SimPlan(*counts, profile=small, rules=rules)
    outcome = simulate(plan, trace)
    assert len(outcome.requests) == 150
    assert sum(served.total_s is not None for served in outcome.requests) > 30
