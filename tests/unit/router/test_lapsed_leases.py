"""Leases that end before they are taken: who holds them until then, whom their end is laid to, what is tried next."""

from __future__ import annotations

import pytest

from services.core.errors import LeaseInvalid, ProtocolViolation, TransferFailed, WorkerFailed
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.events import (
    CancelLeg,
    DecodeAdmitted,
    ImportFailed,
    LeaseEnd,
    LeaseEnded,
    LegFailed,
    SendLeg,
)
from services.router.coordinator.request import Phase
from services.router.policy import Role
from services.router.policy.health import Health
from tests.support.router_bench import BUSY, Bench, started, tokens


def test_the_source_judges_a_handoff_that_was_admitted(bench: Bench) -> None:
    """Whoever was admitted fetches at once. The router holds the lease no longer, so that one which is neither fetched
    nor released expires long before the bound of a queue, and the blocks of both workers come back."""
    prefill, decode = bench.handed_over()
    lease_id = bytes(15) + bytes([prefill.leg])
    assert bench.coordinator.held_leases("p") == [lease_id], "it may still be refused"
    bench.say("d", DecodeAdmitted(decode.leg))
    bench.say("p", tokens(prefill, 100))
    assert bench.coordinator.held_leases("p") == []
    bench.beat("d", 10.0, **BUSY)
    bench.say("p", LeaseEnded(prefill.leg, LeaseEnd.EXPIRED))
    bench.wait(1.9)
    assert bench.phase() is Phase.DECODING, "perhaps it had everything, and its word is on the way"
    bench.wait(0.2)
    assert bench.take(CancelLeg).leg == decode.leg
    assert bench.take_leg(Role.PREFILL).token_ids == (*range(20), 100)


@pytest.mark.parametrize("says", ["nothing", "that it failed"])
def test_a_lease_that_ends_in_a_targets_hands_counts_against_the_way_between_the_two(bench: Bench, says: str) -> None:
    """Where nothing can cross, the source gives the lease up before the target does: time after time, for ever."""
    bench.submit()
    for _ in range(CoordinatorConfig.max_crashes):
        prefill = bench.take_leg(Role.PREFILL)
        bench.say("p", started(prefill))
        decode = bench.take_leg(Role.DECODE)
        bench.say("d", DecodeAdmitted(decode.leg))
        bench.say("p", tokens(prefill, 100))
        bench.say("p", LeaseEnded(prefill.leg, LeaseEnd.EXPIRED))
        if says == "nothing":
            bench.wait(2.1)
        else:
            bench.say("d", ImportFailed(decode.leg, False, LeaseInvalid("expired")))
        bench.wait(CoordinatorConfig.last_chance_pause_s)
    assert isinstance(bench.failed["r"], WorkerFailed)
    (pair,) = bench.coordinator.workers.get("d").sources.all()
    assert not pair.health.usable
    assert bench.coordinator.workers.get("p").health.usable


@pytest.fixture
def three() -> Bench:
    """Returns a bench with a source, and two workers that could take over from it."""
    bench = Bench()
    for worker_id, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("e", Role.DECODE)):
        bench.join(worker_id, role)
    return bench


def handed_over_to_d(bench: Bench) -> tuple[SendLeg, SendLeg]:
    """Returns a request that was handed over to "d", as whichever is asked is called below; both are alike."""
    prefill, decode = bench.handed_over()
    bench.say(decode.worker_id, DecodeAdmitted(decode.leg))
    bench.say("p", tokens(prefill, 100))
    return prefill, decode


def test_whoever_is_asked_next_is_not_blamed_for_a_lease_that_another_let_end(three: Bench) -> None:
    """The first has failed, and its report and the end of the lease come together: the second was never tried."""
    prefill, first = handed_over_to_d(three)
    three.say(first.worker_id, ImportFailed(first.leg, True, TransferFailed("stalled")))
    second = three.take_leg(Role.DECODE)
    assert second.worker_id != first.worker_id
    three.say("p", LeaseEnded(prefill.leg, LeaseEnd.EXPIRED))
    three.say(second.worker_id, ImportFailed(second.leg, False, LeaseInvalid("expired")))
    (pair,) = three.coordinator.workers.get(second.worker_id).sources.all()
    assert (pair.health.state, pair.health.num_failures) == (Health.UP, 0)
    assert three.coordinator.workers.get("p").health.num_failures == 0
    assert_one_chance_is_used_up(three)


def test_a_source_is_not_blamed_for_a_lease_whose_import_failed(bench: Bench) -> None:
    prefill, decode = handed_over_to_d(bench)
    bench.say("d", ImportFailed(decode.leg, True, TransferFailed("stalled")))
    bench.say("p", LeaseEnded(prefill.leg, LeaseEnd.EXPIRED))
    assert bench.coordinator.workers.get("p").health.num_failures == 0
    assert_one_chance_is_used_up(bench)


def assert_one_chance_is_used_up(bench: Bench) -> None:
    """Asserts that of three failures under it the request had one: the next but one ends it, and not the next."""
    for number in (2, 3):
        assert not bench.failed, f"before failure {number}"
        bench.wait(CoordinatorConfig.last_chance_pause_s)
        prefill = bench.take_leg(Role.PREFILL)
        bench.say("p", LegFailed(prefill.leg, ProtocolViolation("a step raised")))
    assert isinstance(bench.failed["r"], WorkerFailed)


@pytest.mark.parametrize(("admitted", "sealed"), [(False, True), (True, False)])
def test_a_source_is_blamed_for_a_lease_that_was_held_or_not_sealed(bench: Bench, admitted: bool, sealed: bool) -> None:
    prefill, decode = bench.handed_over()
    if admitted:
        bench.say("d", DecodeAdmitted(decode.leg))
    if sealed:
        bench.say("p", tokens(prefill, 100))
    bench.say("p", LeaseEnded(prefill.leg, LeaseEnd.ABORTED))
    bench.wait(2.1)
    (pair,) = bench.coordinator.workers.get("d").sources.all()
    assert pair.health.num_failures == 0
    assert bench.coordinator.workers.get("p").health.num_failures == 1


def test_a_lease_of_a_source_that_leaves_counts_against_nobody(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say("d", DecodeAdmitted(decode.leg))
    bench.say("p", tokens(prefill, 100))
    bench.coordinator.drain("p", bench.now)
    bench.say("p", LeaseEnded(prefill.leg, LeaseEnd.ABORTED))
    bench.wait(2.1)
    (pair,) = bench.coordinator.workers.get("d").sources.all()
    assert pair.health.state is Health.UP
    assert bench.take_leg(Role.DECODE).handoff is None, "the decode worker computes it whole"


def test_a_lease_whose_import_failed_is_held_again(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say("d", DecodeAdmitted(decode.leg))
    bench.say("p", tokens(prefill, 100))
    bench.say("d", ImportFailed(decode.leg, True, TransferFailed("broken")))
    assert bench.coordinator.held_leases("p") == [bytes(15) + bytes([prefill.leg])]
