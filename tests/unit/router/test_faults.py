"""Tests the coordinator when things break: stale legs, gaps, failures, losses, replays, the crash counter."""

from __future__ import annotations

import pytest

from services.core.errors import (
    BatonError,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    LeaseInvalid,
    Overloaded,
    StepFailed,
    TransferFailed,
    WorkerFailed,
)
from services.router.coordinator.events import (
    CancelLeg,
    DecodeAdmitted,
    DecodeRefused,
    FinishReason,
    ImportFailed,
    ImportReady,
    LeaseEnd,
    LeaseEnded,
    LegEvent,
    LegFailed,
    SendLeg,
    Tokens,
)
from services.router.coordinator.request import Phase
from services.router.coordinator.workers import WorkerState
from services.router.policy import Fingerprint, Role
from tests.support.router_bench import Bench, started, tokens, two_of_each

GONE = LeaseInvalid("gone")


@pytest.fixture
def bench() -> Bench:
    return two_of_each()


# Stale legs


def test_events_of_a_given_up_prefill_leg_change_nothing_and_cancel_it(bench: Bench) -> None:
    bench.submit()
    old = bench.take_leg(Role.PREFILL)
    bench.lose("p1")
    new = bench.take_leg(Role.PREFILL)
    assert (new.worker_id, new.output_base) == ("p2", 0)
    bench.join("p1", Role.PREFILL)  # it wakes up and still believes in its leg
    bench.say("p1", started(old))
    bench.say("p1", tokens(old, 99))
    assert [cancel.leg for cancel in bench.take_all(CancelLeg)] == [old.leg, old.leg]
    bench.say("p1", LeaseEnded(old.leg, LeaseEnd.ABORTED), LegFailed(old.leg, StepFailed("x")))
    assert not bench.take_all(CancelLeg), "a leg that is over needs no cancel"
    bench.finish(new, [201, 202])


def test_events_of_a_given_up_decode_leg_change_nothing_and_cancel_it(bench: Bench) -> None:
    prefill, old = bench.handed_over()
    bench.wait(10.0)  # no answer: the leg is given up, its lease is not
    assert bench.take(CancelLeg).leg == old.leg
    new = bench.take_leg(Role.DECODE)
    assert new.worker_id == "d2"
    assert new.handoff == old.handoff
    bench.say("d1", DecodeAdmitted(old.leg))
    bench.say("d1", ImportReady(old.leg), tokens(old, 99))
    bench.say("d1", DecodeRefused(old.leg), ImportFailed(old.leg, True, GONE), LegFailed(old.leg, GONE))
    assert {cancel.leg for cancel in bench.take_all(CancelLeg)} == {old.leg}
    assert bench.output["r"] == []
    bench.say("d2", DecodeAdmitted(new.leg), ImportReady(new.leg), tokens(new, 1, finish=FinishReason.STOP))
    bench.say("p1", tokens(prefill, 1))
    bench.assert_idle()


def test_messages_of_an_old_incarnation_are_void(bench: Bench) -> None:
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.lose("p1")
    bench.join("p1", Role.PREFILL, incarnation=2)
    bench.coordinator.take_actions()
    bench.coordinator.worker_events("p1", 1, [started(prefill)], None, bench.now)
    bench.coordinator.worker_lost("p1", 1, bench.now, crashed=True)
    bench.coordinator.session_opened("p1", 1, bench.now)
    assert not bench.coordinator.take_actions()
    assert bench.coordinator.workers.get("p1").state is WorkerState.READY


# Protocol errors


@pytest.mark.parametrize(
    ("position", "token_ids"),
    [(2, (5,)), (-1, (5,)), (0, (100, 5, 5, 5, 5, 5, 5, 5, 5)), (0, (99, 5))],
    ids=["gap", "negative", "beyond max_tokens", "another first token"],
)
def test_tokens_out_of_place_end_the_leg_and_the_request_goes_on(
    bench: Bench, position: int, token_ids: tuple[int, ...]
) -> None:
    _, decode = bench.decoding()
    bench.say("d1", Tokens(decode.leg, position, token_ids))
    assert bench.take(CancelLeg).leg == decode.leg
    replay = bench.take_leg(Role.PREFILL)
    assert (replay.token_ids[-1], replay.output_base) == (100, 1)
    bench.finish(replay, [100, 201, 202])


def test_a_token_before_its_lease_ends_the_leg(bench: Bench) -> None:
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p1", tokens(prefill, 1))
    assert bench.take(CancelLeg).leg == prefill.leg
    assert bench.take_leg(Role.PREFILL).worker_id == "p2", "it is tried elsewhere"


def test_an_event_of_the_other_phase_ends_the_leg(bench: Bench) -> None:
    """The session carries the events of both phases, so a worker could say of a leg what cannot happen to it."""
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p1", ImportReady(prefill.leg))
    assert bench.take(CancelLeg).leg == prefill.leg
    again = bench.take_leg(Role.PREFILL)
    bench.say("p2", started(again))
    decode = bench.take_leg(Role.DECODE)
    bench.say("d1", LeaseEnded(decode.leg, LeaseEnd.EXPIRED))
    assert bench.take(CancelLeg).leg == decode.leg
    assert bench.take_leg(Role.DECODE).handoff == decode.handoff, "its lease lives"


# Prefill failures


def test_a_prefill_failure_replays_elsewhere_and_gives_the_decode_leg_up(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say("p1", LegFailed(prefill.leg, StepFailed("out of memory")))
    assert bench.take(CancelLeg).leg == decode.leg
    assert not bench.take_all(CancelLeg)
    bench.finish(bench.take_leg(Role.PREFILL), [201, 202])
    assert bench.finished["r"].summary.num_retries == 1


@pytest.mark.parametrize("error", [InvalidRequest("f", "bad"), DeadlineExceeded("late"), Overloaded("never fits")])
def test_errors_that_no_other_worker_would_avoid_end_the_request(bench: Bench, error: BatonError) -> None:
    prefill, decode = bench.handed_over()
    bench.say("p1", LegFailed(prefill.leg, error))
    assert bench.failed["r"] is error
    assert bench.take(CancelLeg).leg == decode.leg
    bench.assert_idle()


def test_a_draining_worker_is_left_alone_and_does_not_count(bench: Bench) -> None:
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    for incarnation in range(2, 8):
        drained = prefill.worker_id
        bench.say(drained, LegFailed(prefill.leg, Draining("bye")))
        assert bench.coordinator.workers.get(drained).state is WorkerState.DRAINING
        prefill = bench.take_leg(Role.PREFILL)
        assert prefill.worker_id != drained
        bench.lose(drained, crashed=False)
        bench.join(drained, Role.PREFILL, incarnation=incarnation)
    assert not bench.failed


def test_a_lease_that_ends_unused_is_replayed(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say("d1", DecodeRefused(decode.leg))
    second = bench.take_leg(Role.DECODE)
    bench.say("d2", DecodeRefused(second.leg))
    bench.say("p1", tokens(prefill, 100), LeaseEnded(prefill.leg, LeaseEnd.EXPIRED))
    replay = bench.take_leg(Role.PREFILL)
    assert replay.output_base == 1
    bench.finish(replay, [100, 201, 202])


def test_a_lease_that_ends_under_a_decode_leg_waits_for_its_report(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say("d1", DecodeAdmitted(decode.leg))
    bench.say("p1", tokens(prefill, 100), LeaseEnded(prefill.leg, LeaseEnd.RELEASED))
    assert not bench.take_legs(Role.PREFILL)
    bench.say("d1", ImportReady(decode.leg), tokens(decode, 100, 101))
    bench.wait(60.0)
    assert bench.output["r"] == [100, 101]
    assert bench.phase() is Phase.DECODING


# Decode failures


def test_a_failed_import_whose_lease_lives_goes_to_another_worker(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say("d1", DecodeAdmitted(decode.leg), ImportFailed(decode.leg, True, GONE))
    again = bench.take_leg(Role.DECODE)
    assert (again.worker_id, again.handoff) == ("d2", decode.handoff)
    assert not bench.take_all(CancelLeg)
    bench.say("d2", DecodeAdmitted(again.leg), ImportFailed(again.leg, True, GONE))
    assert bench.take(CancelLeg).leg == prefill.leg, "twice: the lease is of no use"
    assert bench.take_leg(Role.PREFILL).worker_id == "p2"


def test_a_failed_import_whose_lease_is_dead_is_replayed(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say("p1", tokens(prefill, 100))
    bench.say("d1", DecodeAdmitted(decode.leg), ImportFailed(decode.leg, False, GONE))
    bench.finish(bench.take_leg(Role.PREFILL), [100, 201, 202])


def test_a_failed_decode_step_replays_prompt_and_output(bench: Bench) -> None:
    _, decode = bench.decoding()
    bench.say("d1", tokens(decode, 101, 102, at=1), LegFailed(decode.leg, StepFailed("x")))
    replay = bench.take_leg(Role.PREFILL)
    assert replay.token_ids == (*range(20), 100, 101, 102)
    assert replay.output_base == 3
    bench.finish(replay, [100, 101, 102, 201, 202])


# Losses


def test_a_lost_prefill_worker_before_its_lease(bench: Bench) -> None:
    bench.submit()
    bench.take_leg(Role.PREFILL)
    bench.lose("p1")
    assert not bench.take_all(CancelLeg), "there is no session to send it on"
    bench.finish(bench.take_leg(Role.PREFILL), [201, 202])


def test_a_lost_source_leaves_a_decode_leg_that_may_have_everything(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say("d1", DecodeAdmitted(decode.leg))
    bench.say("p1", tokens(prefill, 100))
    bench.lose("p1")
    assert not bench.take_legs(Role.PREFILL)
    bench.say("d1", ImportReady(decode.leg), tokens(decode, 100, 101))
    bench.wait(60.0)
    bench.say("d1", tokens(decode, 102, at=2, finish=FinishReason.STOP))
    assert bench.output["r"] == [100, 101, 102]
    bench.assert_idle()


def test_a_lost_source_with_an_incomplete_import_is_replayed(bench: Bench) -> None:
    _, decode = bench.handed_over()
    bench.say("d1", DecodeAdmitted(decode.leg))
    bench.lose("p1")
    bench.say("d1", ImportFailed(decode.leg, True, GONE))
    bench.finish(bench.take_leg(Role.PREFILL), [201, 202])


def test_a_decode_leg_without_source_must_report_in_time(bench: Bench) -> None:
    _, decode = bench.handed_over()
    bench.say("d1", DecodeAdmitted(decode.leg))
    bench.lose("p1")
    bench.wait(1.9)
    assert not bench.take_legs(Role.PREFILL)
    bench.wait(0.2)
    assert bench.take(CancelLeg).leg == decode.leg
    bench.finish(bench.take_leg(Role.PREFILL), [201, 202])


def test_a_refused_handoff_without_source_is_replayed(bench: Bench) -> None:
    _, decode = bench.handed_over()
    bench.lose("p1")
    bench.say("d1", DecodeRefused(decode.leg))
    assert bench.take_leg(Role.PREFILL).worker_id == "p2"


def test_a_lost_decode_worker_that_was_importing_leaves_the_lease_to_another(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say("d1", DecodeAdmitted(decode.leg))
    bench.lose("d1")
    again = bench.take_leg(Role.DECODE)
    assert (again.worker_id, again.handoff) == ("d2", decode.handoff)
    assert bench.coordinator.held_leases("p1")
    # Unless the dead one had released it: then the source says so, and so does the new leg's fetch.
    bench.say("p1", tokens(prefill, 100), LeaseEnded(prefill.leg, LeaseEnd.RELEASED))
    bench.say("d2", DecodeAdmitted(again.leg), ImportFailed(again.leg, False, GONE))
    bench.finish(bench.take_leg(Role.PREFILL), [100, 201, 202])


def test_a_lease_that_nobody_left_can_fetch_is_given_up_for_another_place() -> None:
    """The case was found by cutting a prefill worker off from all decode workers: its handoffs waited for it until they
    failed."""
    bench = Bench()
    bench.join("p1", Role.PREFILL)
    bench.join("d1", Role.DECODE)
    first, _ = bench.handed_over()
    bench.lose("d1")
    bench.wait(0.1)
    assert bench.phase() is Phase.PARKED, "with nowhere else to go it is kept"
    bench.join("p2", Role.PREFILL, fingerprint=Fingerprint("M"))
    bench.wait(0.1)
    assert bench.phase() is Phase.PARKED
    bench.join("d2", Role.DECODE, fingerprint=Fingerprint("M"))
    bench.wait(0.1)
    assert bench.take(CancelLeg).leg == first.leg
    assert bench.take_leg(Role.PREFILL).worker_id == "p2"


def test_a_lost_decode_worker_that_was_generating_means_replay(bench: Bench) -> None:
    _, decode = bench.decoding()
    bench.say("d1", tokens(decode, 101, at=1))
    bench.lose("d1")
    replay = bench.take_leg(Role.PREFILL)
    assert replay.output_base == 2
    bench.finish(replay, [100, 101, 201, 202])


def test_a_sequence_that_outgrew_the_prefill_pools_is_replayed_on_a_decode_worker() -> None:
    bench = Bench()
    bench.join("p", Role.PREFILL, num_blocks=2)
    bench.join("d1", Role.DECODE)
    bench.join("d2", Role.DECODE, num_blocks=63)
    _, decode = bench.decoding(num_tokens=30, max_tokens=50)
    bench.say("d1", tokens(decode, 101, 102, at=1))
    bench.lose("d1")
    whole = bench.take_leg(Role.DECODE)
    assert (whole.worker_id, whole.handoff, whole.output_base) == ("d2", None, 3)
    assert whole.token_ids == (*range(30), 100, 101, 102)


def test_a_lost_mixed_worker_counts_once_for_both_its_legs() -> None:
    bench = Bench(max_crashes=2)
    bench.join("m1", Role.MIXED)
    bench.join("m2", Role.MIXED)
    _, decode = bench.handed_over()
    bench.lose(decode.worker_id)
    assert not bench.failed
    bench.wait(1.0)
    assert bench.take_leg(Role.PREFILL).worker_id != decode.worker_id


def lies_of(leg: SendLeg, lie: str) -> list[LegEvent]:
    """Returns what a worker says that ends a leg as it cannot end."""
    failed = ImportFailed(leg.leg, lease_alive=False, error=TransferFailed("x"))
    released = LeaseEnded(leg.leg, LeaseEnd.RELEASED)
    if leg.phase is Role.DECODE:
        return [failed] if leg.handoff is None else [DecodeAdmitted(leg.leg), ImportReady(leg.leg), failed]
    if lie == "it was never offered":
        return [started(leg), released]
    return [released] if lie == "there is no lease" else [started(leg), tokens(leg, 7)]


@pytest.mark.parametrize("lie", ["there is no lease", "it was never offered", "the import is over", "no handoff"])
def test_a_worker_cannot_have_a_request_computed_for_ever(lie: str) -> None:
    """An end that cannot be is a failure. If it were none, the request would be placed again as often as it is told."""
    bench = Bench()
    if lie != "no handoff":
        bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    bench.submit()
    for _ in range(100):
        if "r" in bench.failed:
            break
        for leg in bench.take_all(SendLeg):
            bench.say(leg.worker_id, *lies_of(leg, lie))
        bench.wait(0.5)
        for worker_id in bench.infos:
            bench.load(worker_id)
    assert isinstance(bench.failed.get("r"), WorkerFailed), "it is tried for ever"


@pytest.mark.parametrize("said", [(7, 8), ()])
def test_a_prefill_samples_one_token(bench: Bench, said: tuple[int, ...]) -> None:
    """More than that would reach the client, and the decode worker would be blamed for repeating one of them."""
    prefill, _ = bench.handed_over()
    bench.say(prefill.worker_id, tokens(prefill, *said))
    assert bench.coordinator.workers.get(prefill.worker_id).health.reason == "PROTOCOL_VIOLATION: token out of place"
    assert bench.output["r"] == []
