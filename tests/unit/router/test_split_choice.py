"""Tests that the coordinator splits a prompt, or does not, by --split and by what has been measured; and says why."""

from __future__ import annotations

import pytest

from services.core.errors import BatonError
from services.router.coordinator.events import (
    DecodeAdmitted,
    FinishReason,
    ImportReady,
    LeaseEnd,
    LeaseEnded,
    LegFailed,
)
from services.router.policy import PlacedPhase, Role, Split, WhySplit, WhyUnsplit
from services.router.policy.handoff_time import MEMORY_S, MIN_HANDOFFS
from tests.support.router_bench import Bench, started, tokens


def measured(split: Split = Split.AUTO) -> Bench:
    """Returns one prefill and one decode worker that have measured what prompts cost."""
    bench = Bench(split=split)
    for worker_id, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        bench.join(worker_id, role)
        bench.load(worker_id, ms_per_prefill_token=0.5, ms_per_decode_step=20.0, ms_per_decode_sequence=1.0)
    return bench


def hand_over(bench: Bench, request_id: str, *, took_s: float, released_first: bool = False) -> None:
    """Serves a request of 64 tokens: a stream shares a delay among so many."""
    bench.submit(request_id, num_tokens=40, max_tokens=64)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill))
    decode = bench.take_leg(Role.DECODE)
    bench.say("d", DecodeAdmitted(decode.leg))
    bench.say("p", tokens(prefill, 1))
    bench.clock.advance(took_s)
    if released_first:
        bench.say("p", LeaseEnded(prefill.leg, LeaseEnd.RELEASED))
        bench.clock.advance(0.001)
    rest = tokens(decode, *range(63), at=1, finish=FinishReason.LENGTH)
    bench.say("d", ImportReady(decode.leg), tokens(decode, 1), rest)


def learned(took_s: float = 0.01, *, released_first: bool = False) -> Bench:
    """Returns the two, between which handoffs have taken so long."""
    bench = measured()
    for number in range(MIN_HANDOFFS):
        hand_over(bench, f"before {number}", took_s=took_s, released_first=released_first)
    return bench


@pytest.mark.parametrize("released_first", [False, True])
def test_a_short_prompt_runs_unsplit_once_handoffs_are_measured(released_first: bool) -> None:
    """Either end may be the first to say that a handoff is over."""
    bench = learned(released_first=released_first)
    bench.submit("short", num_tokens=1, max_tokens=2)
    leg = bench.take_leg(Role.DECODE)
    assert leg.worker_id == "d"
    assert leg.handoff is None
    assert leg.choice is not None
    assert leg.choice.phase is PlacedPhase.UNSPLIT
    assert leg.choice.unsplit is not None
    assert (leg.choice.unsplit.why, leg.choice.unsplit.prefill_id) == (WhyUnsplit.HANDOFF, "p")
    assert leg.choice.unsplit.costs is not None
    assert leg.choice.unsplit.costs.handoff_ms == pytest.approx(10.0)
    bench.say("d", DecodeAdmitted(leg.leg), tokens(leg, 7), tokens(leg, 8, at=1, finish=FinishReason.LENGTH))
    assert bench.output["short"] == [7, 8]


def test_a_long_prompt_is_split_all_the_same() -> None:
    bench = learned()
    bench.submit("long", num_tokens=400)
    choice = bench.take_leg(Role.PREFILL).choice
    assert choice is not None
    assert choice.unsplit is None
    assert choice.split is not None
    assert (choice.split.why, choice.split.decode_id) == (WhySplit.CHEAPER, "d")
    assert choice.split.costs is not None
    assert choice.split.costs.handoff_ms == pytest.approx(10.0)
    assert choice.split.costs.unsplit_ms >= choice.split.costs.split_ms


def test_a_prompt_that_no_decode_worker_has_room_for_says_so() -> None:
    bench = learned()
    bench.load("d", blocks_free=2, blocks_active=62, num_running=1)
    bench.submit("short", num_tokens=40)
    choice = bench.take_leg(Role.PREFILL).choice
    assert choice is not None
    assert choice.split is not None
    assert (choice.split.why, choice.split.costs) == (WhySplit.NO_ROOM, None)


@pytest.mark.parametrize("took_s", [0.1, 1.0])
def test_over_a_slow_pair_long_prompts_run_unsplit_too(took_s: float) -> None:
    bench = learned(took_s)
    bench.submit("long", num_tokens=400)
    assert bench.take_leg(Role.DECODE).handoff is None


def test_until_handoffs_are_measured_a_short_prompt_is_split() -> None:
    bench = measured()
    bench.submit(num_tokens=1)
    bench.take_leg(Role.PREFILL)


def test_a_measurement_is_forgotten_and_the_pair_tried_again() -> None:
    bench = learned()
    for _ in range(int(MEMORY_S) + 1):
        bench.wait(1.0)
    bench.submit("short", num_tokens=1)
    bench.take_leg(Role.PREFILL)


def test_without_measured_costs_all_is_split() -> None:
    bench = Bench(split=Split.AUTO)
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    bench.load("p", queued_prefill_tokens=5000, num_waiting=1)
    bench.submit(num_tokens=1)
    choice = bench.take_leg(Role.PREFILL).choice
    assert choice is not None
    assert choice.split is not None
    assert choice.split.why is WhySplit.UNKNOWN


def test_a_prompt_passes_a_queue_at_the_prefill_worker() -> None:
    bench = measured()
    bench.load("p", queued_prefill_tokens=5000, num_waiting=1)
    bench.submit(num_tokens=100)
    choice = bench.take_leg(Role.DECODE).choice
    assert choice is not None
    assert choice.unsplit is not None
    assert choice.unsplit.why is WhyUnsplit.QUEUE


def test_a_prompt_that_finds_the_prefill_workers_queue_full_need_not_wait() -> None:
    bench = measured()
    bench.load("p", queued_prefill_tokens=9000, num_waiting=1)
    bench.submit(num_tokens=100)
    assert bench.take_leg(Role.DECODE).handoff is None


def test_room_for_handoffs_in_flight_is_not_taken() -> None:
    """D has room for one of the two prompts, and the one under way comes first."""
    bench = measured()
    bench.submit("first", num_tokens=400)
    bench.take_leg(Role.PREFILL)
    bench.load("p", queued_prefill_tokens=9000, num_waiting=1)
    bench.load("d", blocks_free=32, blocks_active=32, num_running=1)
    bench.submit("second", num_tokens=200)
    assert not bench.take_legs(Role.DECODE)
    bench.load("d", blocks_free=64, blocks_active=0, num_running=1)
    assert bench.take_leg(Role.DECODE).spec.request_id == "second"


def test_always_splits_what_can_be_split() -> None:
    bench = measured(Split.ALWAYS)
    bench.load("p", queued_prefill_tokens=5000, num_waiting=1)
    bench.submit(num_tokens=1)
    choice = bench.take_leg(Role.PREFILL).choice
    assert choice is not None
    assert choice.split is None, "nothing was weighed"
    assert bench.coordinator.split_break_even(bench.now) is None


def test_never_splits_nothing_that_a_decode_worker_can_run() -> None:
    bench = measured(Split.NEVER)
    bench.submit("long", num_tokens=500)
    leg = bench.take_leg(Role.DECODE)
    assert leg.handoff is None
    assert leg.choice is not None
    assert leg.choice.unsplit is not None
    assert (leg.choice.unsplit.why, leg.choice.unsplit.costs) == (WhyUnsplit.NEVER, None)
    assert bench.coordinator.split_break_even(bench.now) is None


def test_an_unsplit_leg_that_fails_is_replayed() -> None:
    bench = learned()
    bench.submit("short", num_tokens=1, max_tokens=3)
    leg = bench.take_leg(Role.DECODE)
    bench.say("d", DecodeAdmitted(leg.leg), tokens(leg, 7), LegFailed(leg.leg, BatonError("broken")))
    again = [*bench.take_legs(Role.PREFILL), *bench.take_legs(Role.DECODE)]
    assert [each.token_ids for each in again] == [(0, 7)], "prompt and output so far"


def test_the_break_even_is_that_of_the_pair_as_it_is_now() -> None:
    bench = measured()
    found = bench.coordinator.split_break_even(bench.now)
    assert found is not None
    assert (found.prefill_id, found.decode_id, found.tokens, found.handoff_ms) == ("p", "d", 0.0, None)
    bench = learned()
    found = bench.coordinator.split_break_even(bench.now)
    assert found is not None
    assert found.handoff_ms == pytest.approx(10.0)
    for num_tokens, phase in ((int(found.tokens) - 1, Role.DECODE), (int(found.tokens) + 2, Role.PREFILL)):
        bench.submit(str(num_tokens), num_tokens=num_tokens)
        leg = bench.take_leg(phase)
        bench.cancel(str(num_tokens))
        assert leg.worker_id in ("p", "d")


def test_the_handoff_that_counts_is_the_one_that_placement_would_make() -> None:
    """An unsplit sequence would run on "d", to which handoffs take a second, and a handoff would go to "e"."""
    bench = learned(1.0)
    bench.join("e", Role.DECODE)
    bench.load("e", ms_per_prefill_token=0.5, ms_per_decode_step=20.0, ms_per_decode_sequence=1.0, blocks_free=60)
    bench.submit("long", num_tokens=400)
    bench.take_leg(Role.PREFILL)
    found = bench.coordinator.split_break_even(bench.now)
    assert found is not None
    assert (found.decode_id, found.handoff_ms) == ("e", None)
