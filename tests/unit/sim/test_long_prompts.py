"""Tests what short prompts gain, and long ones lose, where long ones are kept off some of the prefill workers."""

from __future__ import annotations

import dataclasses
import random

from services.router.policy.filter import LongPromptConfig
from services.sim.cluster import Outcome, SimPlan, simulate
from services.sim.profile import WorkerProfile
from services.sim.trace import TracedRequest

PROFILE = WorkerProfile(
    "test",
    ms_per_prefill_token=0.1,
    ms_per_decode_step=15.0,
    ms_per_decode_sequence=0.3,
    ms_per_prefill_step=5.0,
    num_blocks=20_000,
    max_num_batched_tokens=2048,
    transfer_bytes_per_s=2e10,
    max_num_seqs=128,
)


def trace(count: int, *, long_share: float) -> list[TracedRequest]:
    """Returns prompts of a few hundred tokens, a share of them of many thousands; four workers are busy for two thirds
    of the time if the share is 0.06."""
    chance, at_s, made = random.Random(1), 0.0, []
    for _ in range(count):
        is_long = chance.random() < long_share
        made.append(TracedRequest(at_s, chance.randint(*((12_000, 20_000) if is_long else (200, 800))), 8))
        at_s += chance.expovariate(18.0)
    return made


def served(requests: list[TracedRequest], isolation: str) -> Outcome:
    plan = SimPlan(4, 2, 0, profile=PROFILE)
    router = dataclasses.replace(plan.router, long_prompts=LongPromptConfig(isolation=isolation))
    outcome = simulate(dataclasses.replace(plan, router=router), requests)
    assert not any(each.error for each in outcome.requests)
    return outcome


def p95_s(outcome: Outcome, *, is_long: bool) -> float:
    """Returns the p95 of short or of long prompts' times to the first token."""
    times = sorted(each.ttft_s or 0.0 for each in outcome.requests if (each.prompt_tokens > 10_000) is is_long)
    return times[int(0.95 * len(times))]


def test_short_prompts_do_not_wait_behind_long_ones() -> None:
    requests = trace(600, long_share=0.06)
    isolated, before = served(requests, "auto"), served(requests, "off")
    assert p95_s(isolated, is_long=False) < p95_s(before, is_long=False) / 3
    assert p95_s(isolated, is_long=True) < 1.5 * p95_s(before, is_long=True)
    assert isolated.seconds < 1.03 * before.seconds


def test_where_long_ones_are_little_of_the_work_nothing_changes() -> None:
    requests = [
        dataclasses.replace(each, prompt_tokens=each.prompt_tokens % 1000 + 300) for each in trace(300, long_share=0.06)
    ]
    assert served(requests, "auto") == served(requests, "off")
