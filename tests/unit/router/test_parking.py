"""Handoffs that wait for a decode worker, sequences that run unsplit on one, and requests that are cancelled."""

from __future__ import annotations

import pytest

from services.core.errors import (
    Cancelled,
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
)
from services.router.coordinator.request import Phase
from services.router.policy import Role
from tests.support.router_bench import Bench, started, tokens


def test_a_refused_handoff_is_parked_and_tried_again_on_a_newer_snapshot(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say("d", DecodeRefused(decode.leg, 2, 1))
    assert bench.phase() is Phase.PARKED
    lease_id = bytes(15) + bytes([prefill.leg])
    assert bench.coordinator.held_leases("p") == [lease_id]
    bench.load("d")
    assert not bench.take_legs(Role.DECODE), "too soon"
    bench.wait(0.3)
    again = bench.take_leg(Role.DECODE)
    assert again.leg > decode.leg
    assert again.handoff == decode.handoff
    assert again.age_s == pytest.approx(0.3)
    bench.say("d", DecodeRefused(again.leg))
    bench.wait(0.3)
    assert not bench.take_legs(Role.DECODE), "no newer snapshot"
    bench.load("d")
    assert bench.take_leg(Role.DECODE).age_s == pytest.approx(0.6)
    assert bench.coordinator.held_leases("p") == [lease_id]


def test_a_refused_handoff_goes_to_another_worker_at_once(bench: Bench) -> None:
    bench.join("d2", Role.DECODE, num_blocks=63)
    _, decode = bench.handed_over()
    assert decode.worker_id == "d"
    bench.say("d", DecodeRefused(decode.leg))
    assert bench.take_leg(Role.DECODE).worker_id == "d2"


def test_parked_handoffs_go_by_priority_then_arrival() -> None:
    bench = Bench()
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    prefills = []
    for request_id, priority in (("first", 0), ("second", 0), ("high", 5)):
        bench.submit(request_id, priority=priority)
        prefills.append(bench.take_leg(Role.PREFILL))
    bench.load("d", blocks_active=64, blocks_free=0, num_running=1)
    for prefill in prefills:
        bench.say("p", started(prefill))
    assert not bench.take_legs(Role.DECODE)
    bench.load("d", blocks_active=0, blocks_free=64, num_running=0)
    assert [sent.spec.request_id for sent in bench.take_legs(Role.DECODE)] == ["high", "first", "second"]


def test_an_aged_handoff_claims_a_worker_and_is_offered_there() -> None:
    bench = Bench()
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    bench.submit("big", num_tokens=400)
    big = bench.take_leg(Role.PREFILL)
    bench.submit("small", num_tokens=20)
    small = bench.take_leg(Role.PREFILL)
    bench.load("d", blocks_active=44, blocks_free=20, num_running=1)
    bench.say("p", started(big))
    assert not bench.take_legs(Role.DECODE)
    bench.wait(1.0)
    offered = bench.take_leg(Role.DECODE)
    assert offered.spec.request_id == "big", "the worker learns its age"
    assert offered.age_s == pytest.approx(1.0)
    bench.say("d", DecodeRefused(offered.leg))
    bench.say("p", started(small))
    assert not bench.take_legs(Role.DECODE), "the younger one leaves that worker alone"
    bench.join("d2", Role.DECODE, num_blocks=10)
    assert bench.take_leg(Role.DECODE).worker_id == "d2", "a worker that can never hold the aged one is free for others"
    bench.wait(1.0)
    bench.load("d", blocks_active=0, blocks_free=64, num_running=0)
    assert bench.take_leg(Role.DECODE).spec.request_id == "big"


def test_a_mixed_source_adopts_its_own_lease_when_all_others_refuse() -> None:
    bench = Bench()
    bench.join("m", Role.MIXED)
    bench.join("d", Role.DECODE)
    _, decode = bench.handed_over()
    assert decode.worker_id == "d"
    bench.say("d", DecodeRefused(decode.leg))
    adopted = bench.take_leg(Role.DECODE)
    assert adopted.worker_id == "m"
    assert adopted.handoff == decode.handoff


def test_mixed_workers_alone_decode_in_place() -> None:
    bench = Bench()
    bench.join("m1", Role.MIXED)
    bench.join("m2", Role.MIXED)
    prefill, decode = bench.handed_over()
    assert prefill.worker_id == decode.worker_id == "m1"
    bench.say("m1", DecodeAdmitted(decode.leg))
    bench.say("m1", tokens(prefill, 1), LeaseEnded(prefill.leg, LeaseEnd.RELEASED))
    bench.say("m1", ImportReady(decode.leg), tokens(decode, 1, 2, finish=FinishReason.STOP))
    assert bench.output["r"] == [1, 2]
    bench.assert_idle()


# Whole sequences on a decode worker


def test_without_a_prefill_worker_the_whole_sequence_runs_on_a_decode_worker() -> None:
    bench = Bench()
    bench.join("d", Role.DECODE)
    bench.submit(max_tokens=2)
    decode = bench.take_leg(Role.DECODE)
    assert decode.handoff is None
    bench.say("d", DecodeAdmitted(decode.leg, cached_tokens=16))
    assert bench.take(EmitStarted).cached_tokens == 16
    bench.say("d", tokens(decode, 1), tokens(decode, 2, at=1, finish=FinishReason.LENGTH))
    assert bench.finished["r"].summary.prefill_worker == "d"
    bench.assert_idle()


def test_a_refused_unsplit_sequence_waits_without_hammering(bench: Bench) -> None:
    bench.lose("p", crashed=False)
    bench.submit()
    decode = bench.take_leg(Role.DECODE)
    bench.say("d", DecodeRefused(decode.leg))
    assert bench.phase() is Phase.QUEUED
    bench.wait(0.5)
    assert not bench.take_legs(Role.DECODE)
    bench.load("d")
    bench.say("d", DecodeAdmitted(bench.take_leg(Role.DECODE).leg))
    bench.stop_string()
    assert bench.finished["r"].summary.num_retries == 0, "refusals are no retries"


def test_a_busy_prefill_worker_is_waited_for(bench: Bench) -> None:
    bench.load("p", blocks_active=64, blocks_free=0)
    bench.submit()
    assert bench.phase() is Phase.QUEUED


# Cancellation


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.PREFILLING, Phase.PARKED, Phase.BINDING, Phase.DECODING])
def test_cancel_in_each_phase(phase: Phase) -> None:
    bench = Bench()
    if phase is Phase.QUEUED:
        bench.submit()
    else:
        bench.join("p", Role.PREFILL)
        bench.join("d", Role.DECODE)
    if phase is Phase.PREFILLING:
        bench.submit()
    elif phase is Phase.PARKED:
        _, decode = bench.handed_over()
        bench.say("d", DecodeRefused(decode.leg))
    elif phase is Phase.BINDING:
        bench.handed_over()
    elif phase is Phase.DECODING:
        bench.decoding()
    assert bench.phase() is phase
    bench.cancel()
    assert isinstance(bench.failed["r"], Cancelled)
    prefill_cancelled = phase in (Phase.PREFILLING, Phase.PARKED, Phase.BINDING)
    decode_cancelled = phase in (Phase.BINDING, Phase.DECODING)
    assert len(bench.take_all(CancelLeg)) == prefill_cancelled + decode_cancelled
    bench.cancel()
    bench.assert_idle()
    bench.submit()  # the id is free again


def test_a_worker_that_shows_more_room_is_asked_again_at_once(bench: Bench) -> None:
    """Until the pause is over an aged handoff would keep the worker from all others, which would wait beside an idle
    worker."""
    bench.load("d", num_running=8)
    _, decode = bench.handed_over()
    for _ in range(6):  # a longer pause each time
        bench.say("d", DecodeRefused(decode.leg))
        bench.wait(0.6)
        bench.load("d")
        decode = bench.take_leg(Role.DECODE)
    bench.say("d", DecodeRefused(decode.leg))
    bench.load("d")
    assert not bench.take_legs(Role.DECODE), "nothing has changed there"
    bench.load("d", num_running=7)
    assert bench.take_leg(Role.DECODE).leg > decode.leg
