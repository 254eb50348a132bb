"""Tests that a router keeps how fast handoffs come from each source, and chooses by what a prompt's bytes take."""

from __future__ import annotations

import math

import pytest

from services.router.coordinator.events import DecodeAdmitted, FinishReason, ImportReady, LeaseEnd, LeaseEnded
from services.router.policy import HandoffTime, PlacedPhase, Role, Split
from services.router.policy.handoff_time import MEMORY_S, MIN_HANDOFFS
from tests.support.router_bench import Bench, started, tokens


@pytest.mark.parametrize("first", ["the destination", "the source"])
def test_the_pairs_rate_is_what_the_destination_reports(first: str) -> None:
    bench = Bench()
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    bench.submit("r", num_tokens=40, max_tokens=4)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill))
    decode = bench.take_leg(Role.DECODE)
    bench.say("d", DecodeAdmitted(decode.leg))
    bench.say("p", tokens(prefill, 1))
    released = LeaseEnded(prefill.leg, LeaseEnd.RELEASED)
    if first == "the source":
        bench.say("p", released)
    bench.say("d", ImportReady(decode.leg, 10_000_000, 5.0), tokens(decode, 1))
    if first == "the destination":
        bench.say("p", released)
    bench.say("d", tokens(decode, 2, 3, 4, at=1, finish=FinishReason.LENGTH))
    (target,) = (worker for worker in bench.coordinator.workers.all() if worker.info.worker_id == "d")
    assert target.sources.bytes_per_s("p") == 2e9


KV = 100_000
"""Bytes of one token's KV, so that 40 tokens are 4 MB."""
SLOW_MS, FAST_MS = 4000.0, 0.4
"""What their copy takes: at 1 MB/s and at 10 GB/s."""


def cluster(*decoders: str, split: Split = Split.ALWAYS) -> Bench:
    """Returns a prefill worker and decode workers that have measured what prompts cost."""
    bench = Bench(split=split)
    for worker_id in ("p", *decoders):
        bench.join(worker_id, Role.PREFILL if worker_id == "p" else Role.DECODE, token_bytes=KV)
        bench.load(worker_id, ms_per_prefill_token=0.5, ms_per_decode_step=20.0, ms_per_decode_sequence=1.0)
    return bench


def hand_over(bench: Bench, request_id: str, copy_ms: float) -> str:
    """Serves a request of 40 tokens. Returns who decoded it."""
    bench.submit(request_id, num_tokens=40, max_tokens=2)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill))
    decode = bench.take_leg(Role.DECODE)
    bench.say(decode.worker_id, DecodeAdmitted(decode.leg))
    bench.say("p", tokens(prefill, 1))
    rest = tokens(decode, 2, at=1, finish=FinishReason.LENGTH)
    bench.say(decode.worker_id, ImportReady(decode.leg, 40 * KV, copy_ms), tokens(decode, 1), rest)
    return decode.worker_id


def phase(bench: Bench, request_id: str, num_tokens: int) -> PlacedPhase:
    """Returns how the request is begun, and cancels it."""
    bench.submit(request_id, num_tokens=num_tokens)
    (leg,) = [*bench.take_legs(Role.PREFILL), *bench.take_legs(Role.DECODE)]
    bench.cancel(request_id)
    assert leg.choice is not None
    return leg.choice.phase


def test_a_pair_that_one_handoff_has_shown_to_be_slow_is_passed_over() -> None:
    bench = cluster("d-0", "d-1")
    assert hand_over(bench, "first", SLOW_MS) == "d-0"
    assert hand_over(bench, "next", FAST_MS) == "d-1"


def test_a_fast_pair_is_used_again() -> None:
    bench = cluster("d-0", "d-1")
    assert [hand_over(bench, f"r{number}", FAST_MS) for number in range(3)] == ["d-0"] * 3


def test_a_slow_pair_is_tried_again_when_its_rate_is_old_and_what_is_new_counts() -> None:
    bench = cluster("d-0", "d-1")
    hand_over(bench, "first", SLOW_MS)
    bench.clock.advance(MEMORY_S + 1)
    for worker_id in ("p", "d-0", "d-1"):
        bench.load(worker_id)
    assert hand_over(bench, "again", FAST_MS) == "d-0"
    assert hand_over(bench, "and again", FAST_MS) == "d-0"


@pytest.mark.parametrize(
    ("copy_ms", "expected"), [(SLOW_MS, PlacedPhase.UNSPLIT), (FAST_MS, PlacedPhase.PREFILL)], ids=["slow", "fast"]
)
def test_a_prompt_is_split_by_what_its_bytes_take_between_the_two(copy_ms: float, expected: PlacedPhase) -> None:
    bench = cluster("d", split=Split.AUTO)
    assert phase(bench, "unknown", 400) is PlacedPhase.PREFILL
    hand_over(bench, "first", copy_ms)
    assert phase(bench, "then", 400) is expected


def test_a_slow_pair_is_split_again_by_one_prompt_when_its_rate_is_old() -> None:
    bench = cluster("d", split=Split.AUTO)
    hand_over(bench, "first", SLOW_MS)
    bench.clock.advance(MEMORY_S + 1)
    for worker_id in ("p", "d"):
        bench.load(worker_id)
    assert [phase(bench, f"r{number}", 400) for number in range(2)] == [PlacedPhase.PREFILL, PlacedPhase.UNSPLIT]


def test_the_break_even_is_where_the_pairs_rate_makes_the_decision_change() -> None:
    bench = cluster("d", split=Split.AUTO)
    for worker_id in ("p", "d"):
        bench.load(worker_id, tokens_per_prefill_step=200.0)
    hand_over(bench, "first", 40 * 5.2)  # a token makes others wait for 5 ms: it pays where a part is hidden
    found = bench.coordinator.split_break_even(bench.now)
    assert found is not None
    assert 200 < found.tokens < 1000
    assert found.handoff_ms == pytest.approx(200 * 5.2 + (found.tokens - 200) * 4.7)
    at = int(found.tokens)
    assert (phase(bench, "a", at - 1), phase(bench, "b", at + 2)) == (PlacedPhase.UNSPLIT, PlacedPhase.PREFILL)


def test_a_copy_is_hidden_by_what_is_computed_meanwhile_but_for_one_step() -> None:
    time = HandoffTime(KV)
    assert time.expected_ms(1000, 100, 2.0, 0.0) is None
    time.copied(40 * KV, 40.0, 0.0)  # 1 ms a token
    assert time.expected_ms(1000, 100, 2.0, 0.0) == pytest.approx(100.0)
    assert time.expected_ms(1000, 100, 0.25, 0.0) == pytest.approx(100.0 + 900 * 0.75)
    assert time.expected_ms(1000, math.inf, 2.0, 0.0) == pytest.approx(1000.0)
    assert time.expected_ms(1000, 100, 2.0, MEMORY_S + 1) is None
    for _ in range(MIN_HANDOFFS):
        time.observe(300.0, 0.0)
    assert time.expected_ms(1000, 100, 2.0, 0.0) == pytest.approx(300.0), "what its bytes do not explain counts too"
