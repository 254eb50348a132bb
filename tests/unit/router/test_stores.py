"""Tests handoffs that wait at a store: when they go there, and that nothing that befalls a store fails a request."""

from __future__ import annotations

import pytest

from services.core.errors import CorruptBlock, Draining, InvalidRequest, LeaseInvalid, Overloaded, TransferFailed
from services.router.coordinator.events import (
    CancelLeg,
    DecodeAdmitted,
    DecodeRefused,
    FinishReason,
    ImportFailed,
    ImportReady,
    LeaseEnd,
    LeaseEnded,
    LegFailed,
    SendLeg,
    StageEnded,
)
from services.router.coordinator.events import Stage as RouterStage
from services.router.coordinator.request import Phase
from services.router.policy import Fingerprint, PlacedPhase, Role, WhyNot
from services.router.policy.health import Health, HealthConfig
from tests.support.router_bench import BUSY, Bench, parked, started, tokens


@pytest.fixture
def bench() -> Bench:
    """Has a store, and a decode worker without room."""
    return with_store()


def with_store(**config: object) -> Bench:
    bench = Bench(**config)
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    bench.join("s", Role.STORE)
    bench.load("d", **BUSY)
    return bench


def computed(bench: Bench, request_id: str = "r", **spec: object) -> SendLeg:
    """Returns the prefill leg of a request whose prompt is computed, and which no decode worker has room for."""
    bench.submit(request_id, **spec)  # type: ignore[arg-type]
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill), tokens(prefill, 100))
    assert not bench.take_legs(Role.DECODE)
    assert not bench.take_legs(Role.STORE), "it may find room in a moment"
    return prefill


def parking(bench: Bench, **spec: object) -> tuple[SendLeg, SendLeg]:
    prefill = computed(bench, **spec)
    bench.wait(0.2)
    return prefill, bench.take_leg(Role.STORE)


def kept(bench: Bench, **spec: object) -> tuple[SendLeg, SendLeg]:
    """Returns the legs of a request whose handoff a store has."""
    prefill, park = parking(bench, **spec)
    bench.say("s", DecodeAdmitted(park.leg), parked(park))
    return prefill, park


def room(bench: Bench) -> SendLeg:
    """Returns the decode leg that is sent when the decode worker has room again."""
    bench.load("d", blocks_active=0, blocks_free=64, num_running=0, num_waiting=0)
    return bench.take_leg(Role.DECODE)


def finish(bench: Bench, decode: SendLeg, expected: list[int]) -> None:
    base = decode.output_base
    bench.say("d", DecodeAdmitted(decode.leg), ImportReady(decode.leg), tokens(decode, expected[base], at=base))
    bench.say("d", tokens(decode, *expected[base + 1 :], at=base + 1, finish=FinishReason.STOP))
    assert bench.output["r"] == expected
    assert "r" in bench.finished
    bench.assert_idle()


def lease(leg: SendLeg) -> bytes:
    return leg.leg.to_bytes(16, "big")


def test_a_handoff_without_a_decode_worker_goes_to_a_store_and_from_there_to_one(bench: Bench) -> None:
    prefill, park = parking(bench)
    assert park.worker_id == "s"
    assert park.handoff is not None
    assert park.handoff.lease_id == lease(prefill)
    assert (park.num_answers, len(park.token_ids), park.output_base) == (1, 20, 0)
    assert park.choice is not None
    assert [name for name, _ in park.choice.weighted(park.choice.winner)] == ["near", "free_memory", "trusted"]
    assert bench.coordinator.held_leases("p") == [lease(prefill)], "until the store has it"
    assert bench.phase() is Phase.PARKED
    bench.say("s", DecodeAdmitted(park.leg), parked(park))
    assert bench.coordinator.held_leases("p") == []
    assert bench.coordinator.held_leases("s") == [lease(park)]
    stage = next(each for each in bench.take_all(StageEnded) if each.stage is RouterStage.PARK)
    assert (stage.worker_id, stage.outcome) == ("s", "done")
    bench.say("p", LeaseEnded(prefill.leg, LeaseEnd.RELEASED))
    decode = room(bench)
    assert decode.handoff is not None
    assert decode.handoff.lease_id == lease(park)
    assert decode.handoff.source == "s"
    finish(bench, decode, [100, 101])
    assert bench.finished["r"].summary.num_retries == 0


def test_the_prefill_worker_may_die_once_the_store_has_it(bench: Bench) -> None:
    kept(bench)
    bench.lose("p")
    assert bench.phase() is Phase.PARKED
    assert not bench.take_legs(Role.PREFILL)
    finish(bench, room(bench), [100, 101])


def test_the_prefill_worker_may_die_before_the_store_has_told(bench: Bench) -> None:
    _, park = parking(bench)
    bench.say("s", DecodeAdmitted(park.leg))
    bench.lose("p")
    assert bench.phase() is Phase.PARKED, "the store may have everything"
    bench.say("s", parked(park))
    finish(bench, room(bench), [100, 101])


def test_the_source_may_be_the_first_to_say_that_its_lease_was_released(bench: Bench) -> None:
    prefill, park = parking(bench)
    bench.say("s", DecodeAdmitted(park.leg))
    bench.say("p", LeaseEnded(prefill.leg, LeaseEnd.RELEASED))
    assert bench.phase() is Phase.PARKED
    bench.say("s", parked(park))
    finish(bench, room(bench), [100, 101])


def test_a_store_that_does_not_say_in_time_what_it_has_is_given_up(bench: Bench) -> None:
    prefill, park = parking(bench)
    bench.say("s", DecodeAdmitted(park.leg))
    bench.say("p", LeaseEnded(prefill.leg, LeaseEnd.RELEASED))
    bench.wait(2.1)
    assert bench.take(CancelLeg).leg == park.leg
    again = bench.take_leg(Role.PREFILL)
    assert again.token_ids[-1] == 100, "what was received is not computed anew for the client"


def test_a_store_whose_source_died_and_that_is_slow_to_find_out_has_not_failed(bench: Bench) -> None:
    _, park = parking(bench)
    bench.say("s", DecodeAdmitted(park.leg))
    bench.lose("p")
    bench.wait(2.1)
    assert bench.take(CancelLeg).leg == park.leg
    assert bench.coordinator.workers.get("s").health.state is Health.UP


def test_a_store_that_does_not_answer_is_given_up_and_the_handoff_stays(bench: Bench) -> None:
    prefill, park = parking(bench)
    for _ in range(27):
        bench.wait(0.4)
    assert bench.take(CancelLeg).leg == park.leg
    assert bench.coordinator.held_leases("p") == [lease(prefill)]
    finish(bench, room(bench), [100, 101])


def test_a_refusal_leaves_the_handoff_where_it_is_and_is_not_repeated_at_once(bench: Bench) -> None:
    prefill, park = parking(bench)
    bench.say("s", DecodeRefused(park.leg))
    bench.wait(0.3)
    assert not bench.take_legs(Role.STORE), "no newer snapshot"
    bench.load("s")
    assert bench.take_leg(Role.STORE).leg > park.leg
    assert bench.coordinator.held_leases("p") == [lease(prefill)]


@pytest.mark.parametrize(
    "error", [TransferFailed("x"), LeaseInvalid("x"), CorruptBlock("x"), Overloaded("x"), InvalidRequest("n", "x")]
)
@pytest.mark.parametrize("alive", [True, False])
def test_a_failed_import_leaves_the_handoff_where_it_is(bench: Bench, error: Exception, alive: bool) -> None:
    prefill, park = parking(bench)
    bench.say("s", DecodeAdmitted(park.leg), ImportFailed(park.leg, alive, error))  # type: ignore[arg-type]
    assert bench.coordinator.held_leases("p") == [lease(prefill)]
    finish(bench, room(bench), [100, 101])


@pytest.mark.parametrize("error", [Overloaded("x"), InvalidRequest("n", "x"), Draining("x"), TransferFailed("x")])
def test_a_leg_that_fails_leaves_the_handoff_where_it_is(bench: Bench, error: Exception) -> None:
    prefill, park = parking(bench)
    bench.say("s", LegFailed(park.leg, error))  # type: ignore[arg-type]
    assert bench.coordinator.held_leases("p") == [lease(prefill)]
    finish(bench, room(bench), [100, 101])


@pytest.mark.parametrize("error", [Overloaded("x"), InvalidRequest("n", "x"), TransferFailed("x")])
def test_what_a_store_loses_is_computed_again_and_counts_as_no_crash(bench: Bench, error: Exception) -> None:
    for round_number in range(4):
        if round_number == 0:
            _, park = kept(bench)
        else:
            again = bench.take_leg(Role.PREFILL)
            bench.say("p", started(again), tokens(again, 100 + round_number))
            bench.wait(9.0)  # the store's pause, after failures
            for _ in range(3):
                bench.load("s")
                bench.load("d")
                bench.wait(9.0)
            found = bench.take_legs(Role.STORE)
            if not found:
                break
            park = found[-1]
            bench.say("s", DecodeAdmitted(park.leg), parked(park))
        bench.say("s", LegFailed(park.leg, error))  # type: ignore[arg-type]
    assert not bench.failed


def test_a_lost_store_is_replaced_by_computing(bench: Bench) -> None:
    kept(bench)
    bench.lose("s")
    again = bench.take_leg(Role.PREFILL)
    assert again.output_base == 1
    assert not bench.failed


def test_a_store_lost_while_it_takes_the_handoff_in_leaves_it(bench: Bench) -> None:
    prefill, park = parking(bench)
    bench.say("s", DecodeAdmitted(park.leg))
    bench.lose("s")
    assert bench.coordinator.held_leases("p") == [lease(prefill)]
    finish(bench, room(bench), [100, 101])


def test_a_lease_that_expires_at_the_store_is_computed_again(bench: Bench) -> None:
    _, park = kept(bench)
    bench.say("s", LeaseEnded(park.leg, LeaseEnd.EXPIRED))
    assert bench.take_leg(Role.PREFILL).output_base == 1


def test_a_cancelled_request_leaves_nothing_at_the_store(bench: Bench) -> None:
    _, park = parking(bench)
    bench.cancel()
    assert park.leg in {each.leg for each in bench.take_all(CancelLeg)}
    bench.assert_idle()
    _, park = kept(bench, request_id="second")
    bench.cancel("second")
    assert park.leg in {each.leg for each in bench.take_all(CancelLeg)}
    bench.assert_idle()


def test_several_answers_are_parked_together(bench: Bench) -> None:
    bench.submit(num_answers=3)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill), *(tokens(prefill, 100 + index, index=index) for index in range(3)))
    bench.wait(0.2)
    park = bench.take_leg(Role.STORE)
    assert park.num_answers == 3
    bench.say("s", DecodeAdmitted(park.leg), parked(park))
    decode = room(bench)
    assert decode.num_answers == 3
    bench.say("d", DecodeAdmitted(decode.leg), ImportReady(decode.leg))
    for index in range(3):
        bench.say("d", tokens(decode, 100 + index, 7, at=0, index=index, finish=FinishReason.STOP))
    assert bench.output["r"] == [100, 7]
    bench.assert_idle()


def test_only_what_is_sealed_is_parked(bench: Bench) -> None:
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill))
    bench.wait(0.5)
    assert not bench.take_legs(Role.STORE)
    bench.say("p", tokens(prefill, 100))
    bench.wait(0.2)
    assert bench.take_legs(Role.STORE)


@pytest.mark.parametrize("facts", [{"fingerprint": Fingerprint("other")}, {"num_blocks": 1}, {"model_id": "other"}])
def test_a_store_that_cannot_keep_it_is_not_asked(facts: dict[str, object]) -> None:
    bench = Bench()
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    bench.join("s", Role.STORE, **facts)
    bench.load("d", **BUSY)
    computed(bench)
    bench.wait(1.0)
    assert not bench.take_legs(Role.STORE)


def test_the_nearest_store_with_the_most_room_is_taken(bench: Bench) -> None:
    bench.join("a-far", Role.STORE, host_id="elsewhere")
    bench.join("t", Role.STORE)
    bench.load("s", blocks_leased=32, blocks_free=32)
    _, park = parking(bench)
    assert park.worker_id == "t"


def test_why_it_is_that_store_is_known(bench: Bench) -> None:
    bench.join("full", Role.STORE)
    bench.load("full", blocks_leased=64, blocks_free=0)
    bench.join("other", Role.STORE, fingerprint=Fingerprint("other"))
    _, park = parking(bench)
    assert park.choice is not None
    assert park.choice.phase is PlacedPhase.PARK
    assert park.choice.winner.worker_id == "s"
    assert {each.worker_id: each.why for each in park.choice.left_out.named} == {
        "full": WhyNot.NO_BLOCKS,
        "other": WhyNot.OTHER_FINGERPRINT,
    }
    assert park.choice.before is not None, "what kept decode workers from it"


def test_a_full_store_is_not_asked_and_prefill_waits_for_room(bench: Bench) -> None:
    bench.load("s", blocks_leased=61, blocks_free=3)
    bench.submit("first", num_tokens=40)
    first = bench.take_leg(Role.PREFILL)
    bench.submit("second", num_tokens=40)
    assert not bench.take_legs(Role.PREFILL), "neither decode worker nor store has room for two"
    bench.load("s", blocks_leased=0, blocks_free=64)
    assert bench.take_leg(Role.PREFILL).spec.request_id == "second"
    bench.say("p", started(first), tokens(first, 1))
    bench.wait(0.2)
    park = bench.take_leg(Role.STORE)
    bench.say("s", DecodeAdmitted(park.leg), parked(park))
    bench.submit("third", num_tokens=40)
    assert bench.take_leg(Role.PREFILL).spec.request_id == "third", "what a store has takes no further room"


def test_a_store_computes_nothing_and_is_sent_no_canary() -> None:
    bench = Bench(health=HealthConfig(canaries=True))
    bench.join("s", Role.STORE)
    bench.wait(1.0)
    assert not bench.take_all(SendLeg)
    assert bench.coordinator.workers.get("s").health.state is Health.UP
    assert not bench.coordinator.ready, "nobody decodes"
    bench.submit()
    bench.wait(1.0)
    assert not bench.take_all(SendLeg)


def test_a_mixed_worker_keeps_its_handoff_for_itself() -> None:
    bench = Bench()
    bench.join("m", Role.MIXED)
    bench.join("s", Role.STORE)
    bench.load("m", **BUSY)
    bench.submit()
    for prefill in bench.take_legs(Role.PREFILL):
        bench.say("m", started(prefill), tokens(prefill, 100))
    bench.wait(1.0)
    assert not bench.take_legs(Role.STORE)


def test_a_heartbeat_that_no_longer_lists_the_leg_ends_it(bench: Bench) -> None:
    prefill, park = parking(bench)
    bench.coordinator.live_legs("s", 1, park.leg, [], bench.now)
    bench.wait(0.0)
    assert bench.coordinator.held_leases("p") == [lease(prefill)]
    bench.load("s")
    bench.wait(0.5)
    again = bench.take_leg(Role.STORE)
    bench.say("s", DecodeAdmitted(again.leg), parked(again))
    bench.coordinator.live_legs("s", 1, again.leg, [], bench.now)
    bench.wait(0.0)
    assert bench.take_leg(Role.PREFILL).output_base == 1


def test_a_drained_store_gets_nothing_and_hands_over_what_it_has(bench: Bench) -> None:
    kept(bench)
    bench.load("s", draining=True)
    computed(bench, "second")
    bench.wait(0.5)
    assert not bench.take_legs(Role.STORE)
    bench.load("d", blocks_active=0, blocks_free=64, num_running=0, num_waiting=0)
    assert {leg.handoff.source for leg in bench.take_legs(Role.DECODE) if leg.handoff} == {"s", "p"}


def test_what_is_migrated_off_a_store_is_computed_again(bench: Bench) -> None:
    kept(bench)
    assert bench.migrate("s") == 1
    assert bench.take_leg(Role.PREFILL).output_base == 1
