"""Tests legs of which nothing is heard: what workers list is compared with what the router believes; silence is
bounded."""

from __future__ import annotations

import pytest

from services.core.errors import Overloaded, WorkerFailed
from services.router.coordinator.events import (
    CancelLeg,
    DecodeAdmitted,
    FinishReason,
    ImportReady,
    LeaseEnd,
    LeaseEnded,
)
from services.router.coordinator.request import Phase
from services.router.policy import Role
from services.router.policy.health import HealthConfig
from tests.support.router_bench import AT_REST, BUSY, Bench, started, tokens


def lists(bench: Bench, worker_id: str, newest_leg: int, *legs: int) -> None:
    incarnation = bench.infos[worker_id].incarnation
    bench.coordinator.live_legs(worker_id, incarnation, newest_leg, frozenset(legs), bench.now)
    bench._absorb()


# What is listed


def test_a_prefill_that_is_not_listed_is_placed_again(bench: Bench) -> None:
    bench.submit()
    lost = bench.take_leg(Role.PREFILL)
    lists(bench, "p", lost.leg)
    again = bench.take_leg(Role.PREFILL)
    assert again.leg > lost.leg
    assert bench.phase() is Phase.PREFILLING


def test_what_the_worker_has_not_received_yet_is_not_judged(bench: Bench) -> None:
    """The command is still on its way."""
    bench.submit()
    command = bench.take_leg(Role.PREFILL)
    lists(bench, "p", command.leg - 1)
    lists(bench, "p", 0)
    assert not bench.take_legs(Role.PREFILL)
    lists(bench, "p", command.leg, command.leg)
    assert not bench.take_legs(Role.PREFILL)
    assert not bench.take_all(CancelLeg)


@pytest.mark.parametrize("beyond", [1, 1 << 62])
def test_who_claims_a_leg_that_was_never_sent_has_lost_none(bench: Bench, beyond: int) -> None:
    bench.submit()
    command = bench.take_leg(Role.PREFILL)
    for _ in range(3):
        lists(bench, "p", command.leg + beyond)
    assert bench.phase() is Phase.PREFILLING
    assert not bench.take_legs(Role.PREFILL)


def test_a_lost_lease_leaves_a_decode_leg_that_may_have_everything(bench: Bench) -> None:
    """The leg that has fetched all of it says so, as after a lost source."""
    prefill, decode = bench.handed_over()
    bench.say("d", DecodeAdmitted(decode.leg))
    bench.say("p", tokens(prefill, 100))
    lists(bench, "p", prefill.leg)
    assert bench.phase() is Phase.DECODING
    bench.say("d", ImportReady(decode.leg), tokens(decode, 100, 101, finish=FinishReason.LENGTH))
    assert bench.output["r"] == [100, 101]
    bench.assert_idle()


def test_a_lost_lease_of_an_unfinished_prompt_takes_its_decode_leg_along(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    lists(bench, "p", prefill.leg)
    assert [cancel.leg for cancel in bench.take_all(CancelLeg)] == [decode.leg, prefill.leg]
    assert bench.take_leg(Role.PREFILL).leg > decode.leg


def test_a_lost_decode_leg_leaves_the_lease_to_another_try(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say("d", DecodeAdmitted(decode.leg))
    bench.say("p", tokens(prefill, 100))
    lists(bench, "d", decode.leg)
    again = bench.take_leg(Role.DECODE)
    assert again.handoff is not None
    assert again.leg > decode.leg


def test_a_lost_sequence_is_computed_again(bench: Bench) -> None:
    prefill, decode = bench.decoding()
    bench.say("p", LeaseEnded(prefill.leg, LeaseEnd.RELEASED))
    bench.say("d", tokens(decode, 101, at=1))
    lists(bench, "d", decode.leg)
    again = bench.take_leg(Role.PREFILL)
    assert again.token_ids == (*range(20), 100, 101)


def test_a_released_lease_is_neither_missed_nor_cancelled(bench: Bench) -> None:
    """The decode worker is heard before the prefill worker."""
    prefill, decode = bench.decoding()
    lists(bench, "p", prefill.leg, prefill.leg)
    assert not bench.take_all(CancelLeg)
    lists(bench, "p", prefill.leg)
    assert bench.phase() is Phase.DECODING
    lists(bench, "d", decode.leg, decode.leg)
    assert bench.phase() is Phase.DECODING


def test_an_orphaned_decode_leg_that_is_not_listed_is_given_up_at_once(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say("d", DecodeAdmitted(decode.leg))
    bench.say("p", tokens(prefill, 100))
    bench.lose("p")
    assert bench.phase() is Phase.DECODING
    lists(bench, "d", decode.leg)
    assert bench.take_leg(Role.DECODE).token_ids == (*range(20), 100), "the whole of it, there being no prefill worker"


def test_a_mixed_worker_lists_the_legs_of_both_phases_at_once() -> None:
    bench = Bench()
    bench.join("m", Role.MIXED)
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("m", started(prefill))
    decode = bench.take_leg(Role.DECODE)
    bench.say("m", DecodeAdmitted(decode.leg))
    lists(bench, "m", decode.leg, prefill.leg, decode.leg)
    assert bench.phase() is Phase.DECODING
    assert not bench.take_all(CancelLeg)
    lists(bench, "m", decode.leg, prefill.leg)
    assert bench.take(CancelLeg).leg == decode.leg
    assert bench.take_leg(Role.DECODE).handoff == decode.handoff, "its lease lives"


@pytest.mark.parametrize("worker_id", ["p", "d"])
def test_what_nobody_knows_is_cancelled(bench: Bench, worker_id: str) -> None:
    lists(bench, worker_id, 4711, 4711)
    assert bench.take(CancelLeg).leg == 4711


def test_canaries_are_known() -> None:
    bench = Bench(health=HealthConfig(canaries=True))
    bench.join("d", Role.DECODE)
    canary = bench.take_leg(Role.DECODE)
    lists(bench, "d", canary.leg, canary.leg)
    assert not bench.take_all(CancelLeg)
    bench.say("d", DecodeAdmitted(canary.leg), tokens(canary, 1, 2, finish=FinishReason.LENGTH))
    lists(bench, "d", canary.leg, canary.leg)
    assert bench.take(CancelLeg).leg == canary.leg


def test_an_old_incarnation_lists_in_vain(bench: Bench) -> None:
    bench.submit()
    command = bench.take_leg(Role.PREFILL)
    bench.coordinator.live_legs("p", 77, command.leg, frozenset(), bench.now)
    bench.coordinator.live_legs("nobody", 1, command.leg, frozenset(), bench.now)
    bench._absorb()
    assert bench.phase() is Phase.PREFILLING
    assert not bench.take_legs(Role.PREFILL)


def test_lost_three_times_is_enough(bench: Bench) -> None:
    bench.submit()
    for _ in range(3):
        bench.wait(1.1)
        lost = bench.take_leg(Role.PREFILL)
        lists(bench, "p", lost.leg)
    bench.wait(1.1)
    assert isinstance(bench.failed["r"], WorkerFailed)
    bench.assert_idle()


# What is listed and says nothing


def test_a_prefill_that_a_worker_at_rest_does_not_begin(bench: Bench) -> None:
    bench.submit()
    silent = bench.take_leg(Role.PREFILL)
    bench.beat("p", 9.5, **AT_REST)
    assert not bench.take_legs(Role.PREFILL)
    bench.beat("p", 2.0, **AT_REST)
    assert bench.take(CancelLeg).leg == silent.leg
    bench.take_leg(Role.PREFILL)


def test_a_router_that_was_stopped_has_not_listened(bench: Bench) -> None:
    """Its own clock says nothing of the worker."""
    bench.submit()
    bench.take_leg(Role.PREFILL)
    bench.wait(60.0)
    bench.wait(0.1)
    assert bench.phase() is Phase.PREFILLING
    assert not bench.take_legs(Role.PREFILL)


def test_a_prefill_in_the_queue_of_a_busy_worker(bench: Bench) -> None:
    """It waits there as long as it might here, and its worker is not to blame."""
    bench.submit()
    bench.take_leg(Role.PREFILL)
    bench.beat("p", 115.0, **BUSY)
    assert bench.phase() is Phase.PREFILLING
    bench.beat("p", 6.0, **BUSY)
    assert isinstance(bench.failed["r"], Overloaded)
    assert not bench.coordinator.workers.get("p").health.num_failures
    bench.assert_idle()


def test_a_prompt_that_takes_long_is_given_its_time(bench: Bench) -> None:
    """46 ms a token were measured on a CPU whose bfloat16 is emulated."""
    bench.submit(num_tokens=900)
    command = bench.take_leg(Role.PREFILL)
    bench.say("p", started(command))
    bench.say("d", DecodeAdmitted(bench.take_leg(Role.DECODE).leg))
    bench.beat("p", 400.0, **BUSY, ms_per_prefill_token=46)
    assert "r" not in bench.failed
    bench.beat("p", 200.0, **BUSY, ms_per_prefill_token=46)
    assert command.leg in [cancel.leg for cancel in bench.take_all(CancelLeg)], "but not for ever"


@pytest.mark.parametrize("load", [AT_REST, BUSY], ids=["at rest", "busy"])
def test_an_unsplit_sequence_that_is_never_begun(load: dict[str, int]) -> None:
    bench = Bench()
    bench.join("d", Role.DECODE)
    bench.submit()
    command = bench.take_legs(Role.DECODE)[-1]
    bench.beat("d", 12.0, **load)
    given_up = command.leg in [cancel.leg for cancel in bench.take_all(CancelLeg)]
    assert given_up == (load is AT_REST)
    bench.beat("d", 400.0, **load)
    assert "r" in bench.failed
    assert isinstance(bench.failed["r"], WorkerFailed if load is AT_REST else Overloaded)


def test_tokens_that_stop_to_come(bench: Bench) -> None:
    prefill, decode = bench.decoding()
    bench.say("p", LeaseEnded(prefill.leg, LeaseEnd.RELEASED))
    bench.beat("d", 8.0, **AT_REST)
    bench.say("d", tokens(decode, 101, at=1))
    bench.beat("d", 9.5, **AT_REST)
    assert bench.phase() is Phase.DECODING, "the last one was heard"
    bench.beat("d", 1.0, **AT_REST)
    assert bench.take(CancelLeg).leg == decode.leg
    assert bench.take_leg(Role.PREFILL).token_ids[-2:] == (100, 101)


def test_an_import_that_waits_for_its_source_has_time(bench: Bench) -> None:
    """The source's own bound counts until it has sealed."""
    prefill, decode = bench.handed_over()
    bench.say("d", DecodeAdmitted(decode.leg))
    bench.beat("p", 50.0, **BUSY)
    bench.beat("d", 50.0, **AT_REST)
    assert bench.phase() is Phase.DECODING
    bench.say("p", tokens(prefill, 100))
    bench.beat("d", 9.5, **AT_REST)
    assert bench.phase() is Phase.DECODING
    bench.beat("d", 1.0, **AT_REST)
    assert bench.take(CancelLeg).leg == decode.leg


def test_a_worker_that_was_busy_until_now_has_time_to_begin(bench: Bench) -> None:
    """The time is counted from the worker's first rest, not from the beginning of the leg's wait."""
    bench.submit()
    command = bench.take_leg(Role.PREFILL)
    for _ in range(20):
        bench.wait(1.0)
        bench.load("p", blocks_active=60, blocks_free=4, num_running=1)
    bench.load("p", blocks_active=0, blocks_free=64, num_running=0)
    bench.wait(0.1)
    assert not bench.take_all(CancelLeg)
    bench.say("p", started(command))
    assert bench.take_leg(Role.DECODE)


def test_an_orphan_has_no_more_time_because_the_router_once_was_stopped(bench: Bench) -> None:
    bench.stop(60.0)
    prefill, decode = bench.handed_over()
    bench.say("d", DecodeAdmitted(decode.leg))
    bench.say("p", tokens(prefill, 100))
    bench.lose("p")
    bench.wait(1.5)
    assert bench.phase() is Phase.DECODING
    bench.wait(1.0)
    assert bench.take(CancelLeg).leg == decode.leg
