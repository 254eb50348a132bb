"""Tests the coordinator when nothing breaks: queue, prefill, handoff, parking, tokens, ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.core.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    NoWorker,
    Overloaded,
)
from services.router.coordinator.events import (
    CancelLeg,
    DecodeAdmitted,
    DecodeRefused,
    EmitStarted,
    FinishReason,
    ImportReady,
    LeaseEnd,
    LeaseEnded,
    Stage,
    StageEnded,
    Tokens,
)
from services.router.coordinator.request import Phase
from services.router.policy import Role
from tests.support.router_bench import Bench, started, tokens


def test_a_request_from_arrival_to_finish(bench: Bench) -> None:
    bench.submit(num_tokens=20, max_tokens=3)
    assert bench.phase() is Phase.PREFILLING
    prefill = bench.take_leg(Role.PREFILL)
    assert (prefill.worker_id, prefill.output_base, prefill.token_ids) == ("p", 0, tuple(range(20)))
    assert prefill.max_tokens == 3

    bench.say("p", started(prefill, cached_tokens=16))
    announced = bench.take(EmitStarted)
    assert (announced.prefill_worker, announced.cached_tokens) == ("p", 16)
    decode = bench.take_leg(Role.DECODE)
    assert bench.phase() is Phase.BINDING
    assert decode.leg > prefill.leg
    assert decode.token_ids == prefill.token_ids
    assert decode.handoff is not None
    assert decode.handoff.source == "p"

    bench.say("d", DecodeAdmitted(decode.leg))
    assert bench.phase() is Phase.DECODING
    bench.say("p", replace(tokens(prefill, 7), timings="prefill timings"))
    assert bench.output["r"] == [7], "token 0 does not wait for the transfer"
    bench.say("d", ImportReady(decode.leg), tokens(decode, 7))
    bench.say("p", LeaseEnded(prefill.leg, LeaseEnd.RELEASED))
    bench.say("d", tokens(decode, 8, 9, at=1, finish=FinishReason.LENGTH))

    assert bench.output["r"] == [7, 8, 9]
    finished = bench.finished["r"]
    assert finished.reason is FinishReason.LENGTH
    summary = finished.summary
    assert (summary.prefill_worker, summary.decode_worker, summary.num_retries) == ("p", "d", 0)
    assert (summary.num_output_tokens, summary.cached_tokens) == (3, 16)
    assert summary.worker_timings == ("prefill timings",)
    assert not bench.take_all(CancelLeg)
    bench.assert_idle()


def test_the_stages_of_a_request(bench: Bench) -> None:
    bench.load("p", blocks_active=64, blocks_free=0)
    bench.submit()
    bench.clock.advance(1.0)
    bench.load("p", blocks_active=0, blocks_free=64)
    prefill = bench.take_leg(Role.PREFILL)
    bench.clock.advance(0.5)
    bench.say("p", started(prefill))
    bench.clock.advance(0.25)
    decode = bench.take_leg(Role.DECODE)
    bench.say("d", DecodeRefused(decode.leg))
    bench.clock.advance(0.25)
    bench.load("d")
    decode = bench.take_leg(Role.DECODE)
    bench.say("d", DecodeAdmitted(decode.leg))
    bench.clock.advance(1.0)
    bench.say("p", tokens(prefill, 1))
    bench.say("d", ImportReady(decode.leg), tokens(decode, 1, finish=FinishReason.STOP))

    stages = [(s.stage, s.worker_id, s.ended_s - s.started_s, s.outcome) for s in bench.take_all(StageEnded)]
    assert stages == [
        (Stage.QUEUE, "", 1.0, "done"),
        (Stage.DECODE, "d", 0.25, "refused"),
        (Stage.PLACE, "d", 0.5, "done"),
        (Stage.PREFILL, "p", 2.0, "done"),
        (Stage.DECODE, "d", 1.0, "done"),
    ]
    summary = bench.finished["r"].summary
    assert (summary.queue_s, summary.prefill_wait_s, summary.prefill_compute_s) == (1.0, 0.5, 1.5)
    assert (summary.ttft_s, summary.total_s) == (3.0, 3.0)


def test_token_0_that_ends_the_sequence_ends_the_bound_decode_leg(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say("d", DecodeAdmitted(decode.leg))
    bench.say("p", tokens(prefill, 7, finish=FinishReason.STOP))
    assert bench.finished["r"].reason is FinishReason.STOP
    assert bench.take(CancelLeg).leg == decode.leg
    assert not bench.take_all(CancelLeg)
    bench.say("d", tokens(decode, 7, finish=FinishReason.STOP))
    assert bench.output["r"] == [7]
    assert not bench.take_all(CancelLeg), "a finished leg needs no cancel"
    bench.assert_idle()


def test_the_decode_worker_may_be_first_with_token_0(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say("d", DecodeAdmitted(decode.leg), ImportReady(decode.leg), tokens(decode, 7, 8))
    bench.say("p", tokens(prefill, 7), LeaseEnded(prefill.leg, LeaseEnd.RELEASED))
    assert bench.output["r"] == [7, 8]
    assert not bench.take_all(CancelLeg), "the leg ended in order"
    bench.say("d", tokens(decode, 9, at=2, finish=FinishReason.STOP))
    bench.assert_idle()


def test_repeats_are_ignored_and_overlaps_merged(bench: Bench) -> None:
    _, decode = bench.decoding()
    bench.say("d", tokens(decode, 100, 101, 102), tokens(decode, 101, at=1), tokens(decode, 102, 103, at=2))
    assert bench.output["r"] == [100, 101, 102, 103]
    logprobs = ("a", "b", "c")
    bench.say("d", Tokens(decode.leg, 3, (103, 104, 105), logprobs))
    assert [action.logprobs for action in bench.actions if getattr(action, "position", None) == 4] == [("b", "c")]


def test_max_tokens_ends_a_request_even_if_its_worker_does_not(bench: Bench) -> None:
    _, decode = bench.decoding(max_tokens=2)
    bench.say("d", tokens(decode, 5, at=1))
    assert bench.finished["r"].reason is FinishReason.LENGTH
    assert bench.take(CancelLeg).leg == decode.leg
    bench.assert_idle()


def test_a_stop_string_ends_all_legs(bench: Bench) -> None:
    _, decode = bench.decoding()
    bench.stop_string()
    assert bench.finished["r"].reason is FinishReason.STOP
    assert bench.take(CancelLeg).leg == decode.leg
    bench.stop_string()  # a second one finds nothing
    bench.assert_idle()


# Admission


def test_bounded_queue() -> None:
    bench = Bench(max_queue=2)
    bench.submit("a")
    bench.submit("b")
    with pytest.raises(Overloaded) as refused:
        bench.submit("c")
    assert refused.value.retry_after_s
    bench.cancel("a")
    bench.submit("c")


def test_a_request_that_fits_no_pool_is_refused_at_once(bench: Bench) -> None:
    with pytest.raises(ContextLengthExceeded) as refused:
        bench.submit(num_tokens=1024)
    assert refused.value.field == "prompt"
    bench.lose("d")
    bench.lose("p")
    bench.submit(num_tokens=900, max_tokens=100)  # lost workers are remembered: they may come back


def test_no_admission_while_stopping(bench: Bench) -> None:
    bench.coordinator.stop_admission()
    with pytest.raises(Draining):
        bench.submit()


def test_the_queue_is_served_by_priority_then_arrival() -> None:
    bench = Bench()
    for request_id, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 5)):
        bench.submit(request_id, priority=priority)
    bench.join("d", Role.DECODE)
    bench.join("p", Role.PREFILL)
    assert [sent.spec.request_id for sent in bench.take_legs(Role.DECODE)] == ["high", "first", "second", "low"]


def test_a_small_request_passes_a_big_one_until_that_is_aged(bench: Bench) -> None:
    bench.load("p", blocks_active=40, blocks_free=24)
    bench.submit("big", num_tokens=800)
    bench.submit("small", num_tokens=20)
    assert bench.take_leg(Role.PREFILL).spec.request_id == "small"
    bench.wait(1.0)
    bench.submit("another", num_tokens=20)
    assert not bench.take_legs(Role.PREFILL)
    bench.load("p", blocks_active=0, blocks_free=64)
    assert bench.take_legs(Role.PREFILL)[0].spec.request_id == "big"


def test_prefill_starts_only_while_decode_room_covers_the_handoffs_in_flight(bench: Bench) -> None:
    bench.load("d", blocks_active=59, blocks_free=5, num_running=1)
    bench.submit("a", num_tokens=40)  # 3 blocks and one
    bench.submit("b", num_tokens=40)
    prefill = bench.take_leg(Role.PREFILL)
    assert prefill.spec.request_id == "a"
    bench.say("p", started(prefill))
    decode = bench.take_leg(Role.DECODE)
    assert not bench.take_legs(Role.PREFILL)
    bench.say("d", DecodeAdmitted(decode.leg))
    assert bench.take_leg(Role.PREFILL).spec.request_id == "b", "with none in flight one is let through"


# Waiting


def test_deadlines_in_the_queue_and_under_way(bench: Bench) -> None:
    bench.submit("a", deadline_s=bench.now + 1.0)
    prefill = bench.take_leg(Role.PREFILL)
    assert prefill.remaining_s == pytest.approx(1.0)
    bench.wait(1.0)
    assert isinstance(bench.failed["a"], DeadlineExceeded)
    assert bench.take(CancelLeg).leg == prefill.leg
    bench.assert_idle()


def test_waiting_for_a_missing_worker_is_bounded() -> None:
    bench = Bench(no_worker_timeout_s=5.0)
    bench.submit(model="tiny")
    bench.wait(0.1)
    bench.wait(4.9)
    assert not bench.failed
    bench.wait(0.2)
    assert isinstance(bench.failed["r"], NoWorker)
    assert bench.failed["r"].retry_after_s
    assert "no worker of model 'tiny'" in str(bench.failed["r"])
    assert "baton status" in str(bench.failed["r"])


def test_waiting_for_a_busy_worker_is_bounded(bench: Bench) -> None:
    bench.load("p", blocks_active=64, blocks_free=0)
    bench.submit()
    bench.wait(119.0)
    assert not bench.failed
    bench.wait(1.0)
    assert isinstance(bench.failed["r"], Overloaded)


def test_a_short_absence_does_not_end_a_long_wait(bench: Bench) -> None:
    bench.load("p", blocks_active=64, blocks_free=0)
    bench.submit()
    bench.wait(60.0)
    bench.lose("d")
    bench.wait(20.0)
    assert not bench.failed
