"""Tests what counts as a crash under a request, and what ends it; workers that leave in order; a router that was
stopped."""

from __future__ import annotations

import pytest

from services.core.errors import (
    DeadlineExceeded,
    SequencePreempted,
    StepFailed,
    TransferFailed,
    UnknownWorker,
    WorkerFailed,
)
from services.router.coordinator.events import (
    CancelLeg,
    DecodeAdmitted,
    FinishReason,
    ImportFailed,
    ImportReady,
    LegFailed,
)
from services.router.coordinator.request import Phase
from services.router.coordinator.workers import WorkerState
from services.router.policy import Role
from services.router.policy.health import Health
from tests.support.router_bench import Bench, started, tokens, two_of_each


@pytest.fixture
def bench() -> Bench:
    return two_of_each()


def crash(bench: Bench, worker_id: str, role: Role) -> None:
    bench.lose(worker_id)
    bench.join(worker_id, role, incarnation=bench.infos[worker_id].incarnation + 1)
    bench.wait(1.0)  # for workers that were lost with it


def test_three_crashes_without_progress_end_a_request(bench: Bench) -> None:
    bench.submit()
    for _ in range(3):
        assert not bench.failed
        crash(bench, bench.take_leg(Role.PREFILL).worker_id, Role.PREFILL)
    assert isinstance(bench.failed["r"], WorkerFailed)
    assert bench.failed["r"].retry_after_s
    bench.assert_idle()


def test_workers_that_are_lost_together_do_not_spend_all_chances(bench: Bench) -> None:
    """The last one is not risked at once: whoever fell in the same moment is noticed meanwhile."""
    prefill, decode = bench.handed_over()
    bench.lose(prefill.worker_id)
    bench.lose(decode.worker_id)
    assert bench.take_leg(Role.PREFILL).worker_id == "p2"
    bench.lose("p2")
    bench.lose("d2")
    bench.wait(0.5)
    assert not bench.take_legs(Role.PREFILL)
    for worker_id, role in (("p2", Role.PREFILL), ("d2", Role.DECODE)):
        bench.join(worker_id, role, incarnation=2)
    bench.wait(0.5)
    assert not bench.failed
    assert bench.take_leg(Role.PREFILL).worker_id == "p2"


def test_one_fault_takes_a_leg_after_another(bench: Bench) -> None:
    """Each loss is noticed after the request was placed on the next one, which is lost too."""
    prefill, decode = bench.handed_over()
    bench.lose(decode.worker_id)
    second = bench.take_leg(Role.DECODE)
    assert second.worker_id != decode.worker_id
    bench.lose(prefill.worker_id)  # a leg from before the first loss: the same fault
    bench.lose(second.worker_id)  # placed since: a second failure
    bench.lose("p2" if prefill.worker_id == "p1" else "p1")
    assert not bench.failed
    for worker_id, role in (("p1", Role.PREFILL), ("p2", Role.PREFILL), ("d1", Role.DECODE), ("d2", Role.DECODE)):
        bench.join(worker_id, role, incarnation=2)
    bench.wait(1.0)
    crash(bench, bench.take_leg(Role.PREFILL).worker_id, Role.PREFILL)
    assert isinstance(bench.failed["r"], WorkerFailed), "what it was placed on afterwards was its last chance"


def test_a_source_that_fell_with_the_decode_worker_leaves_a_last_chance(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.lose(decode.worker_id)
    second = bench.take_leg(Role.DECODE)
    bench.say(second.worker_id, ImportFailed(second.leg, False, TransferFailed("no answer")))
    assert not bench.take_legs(Role.PREFILL), "not at once"
    bench.lose(prefill.worker_id)
    bench.lose("p2" if prefill.worker_id == "p1" else "p1")
    assert not bench.failed


def test_the_prefills_token_is_no_progress_of_decode(bench: Bench) -> None:
    """A sequence that kills decode workers has one token more after each replay, and must not live on it."""
    bench.submit(max_tokens=100)
    for number in range(3):
        prefill = bench.take_leg(Role.PREFILL)
        assert prefill.output_base == number
        bench.say(prefill.worker_id, started(prefill))
        decode = bench.take_leg(Role.DECODE)
        # The decode worker may even be first to report it.
        bench.say(decode.worker_id, DecodeAdmitted(decode.leg), ImportReady(decode.leg), tokens(decode, 50))
        crash(bench, decode.worker_id, Role.DECODE)
    assert isinstance(bench.failed["r"], WorkerFailed)
    assert bench.output["r"] == [50, 50, 50]


def test_progress_in_the_crashed_role_resets_the_counter(bench: Bench) -> None:
    bench.submit(max_tokens=100)
    for number in range(6):
        prefill = bench.take_leg(Role.PREFILL)
        bench.say(prefill.worker_id, started(prefill), tokens(prefill, 50))
        decode = bench.take_leg(Role.DECODE)
        bench.say(decode.worker_id, DecodeAdmitted(decode.leg), ImportReady(decode.leg))
        bench.say(decode.worker_id, tokens(decode, 50, 51))
        crash(bench, decode.worker_id, Role.DECODE)
        assert bench.output["r"] == [50, 51] * (number + 1)
    assert not bench.failed


def test_a_lost_session_of_a_living_worker_is_no_crash(bench: Bench) -> None:
    bench.submit()
    for _ in range(6):
        prefill = bench.take_leg(Role.PREFILL)
        bench.lose(prefill.worker_id)
        bench.join(prefill.worker_id, Role.PREFILL)  # the same incarnation
    assert not bench.failed


def test_orderly_ends_and_migrations_are_no_crashes(bench: Bench) -> None:
    bench.submit()
    for incarnation in range(2, 8):
        prefill = bench.take_leg(Role.PREFILL)
        assert bench.migrate(prefill.worker_id) == 1
        assert bench.take(CancelLeg).leg == prefill.leg
        bench.lose(prefill.worker_id, crashed=False)
        bench.join(prefill.worker_id, Role.PREFILL, incarnation=incarnation)
    assert not bench.failed


def test_failed_legs_count_too(bench: Bench) -> None:
    bench.submit()
    for _ in range(3):
        prefill = bench.take_leg(Role.PREFILL)
        bench.say(prefill.worker_id, LegFailed(prefill.leg, StepFailed("again")))
    assert isinstance(bench.failed["r"], WorkerFailed)


def test_preemptions_are_no_crashes(bench: Bench) -> None:
    """Of an engine that does not compute again what it has preempted."""
    _, decode = bench.decoding(max_tokens=20)
    for _ in range(5):
        bench.say(decode.worker_id, LegFailed(decode.leg, SequencePreempted("full")))
        assert bench.coordinator.workers.get(decode.worker_id).health.state is Health.UP
        prefill = bench.take_leg(Role.PREFILL)
        bench.say(prefill.worker_id, started(prefill), tokens(prefill, 101, at=prefill.output_base))
        decode = bench.take_leg(Role.DECODE)
        bench.say(decode.worker_id, DecodeAdmitted(decode.leg), ImportReady(decode.leg))
    assert not bench.failed


# Draining


def test_a_draining_worker_finishes_what_it_has(bench: Bench) -> None:
    _, decode = bench.decoding()
    bench.coordinator.drain("d1", bench.now)
    bench.submit("s")
    prefill = bench.take_leg(Role.PREFILL)
    bench.say(prefill.worker_id, started(prefill))
    assert bench.take_leg(Role.DECODE).worker_id == "d2"
    bench.say("d1", tokens(decode, 101, at=1, finish=FinishReason.STOP))
    assert "r" in bench.finished
    assert not bench.coordinator.workers.get("d1").legs
    with pytest.raises(UnknownWorker):
        bench.coordinator.drain("nobody", bench.now)


def test_migration_replays_what_a_draining_worker_still_has(bench: Bench) -> None:
    _, decode = bench.decoding()
    assert bench.migrate("d1") == 1
    assert bench.take(CancelLeg).leg == decode.leg
    replay = bench.take_leg(Role.PREFILL)
    bench.say(replay.worker_id, started(replay))
    assert bench.take_leg(Role.DECODE).worker_id == "d2"


def test_a_worker_may_say_that_it_drains(bench: Bench) -> None:
    bench.load("p1", draining=True)
    bench.submit()
    assert bench.take_leg(Role.PREFILL).worker_id == "p2"


def test_a_drained_worker_that_loses_its_session_stays_drained(bench: Bench) -> None:
    bench.coordinator.drain("d1", bench.now)
    bench.lose("d1")
    bench.join("d1", Role.DECODE)
    assert bench.coordinator.workers.get("d1").state is WorkerState.DRAINING
    bench.lose("d1")
    bench.join("d1", Role.DECODE, incarnation=2)
    assert bench.coordinator.workers.get("d1").state is WorkerState.READY


def test_lost_workers_are_forgotten_in_the_end(bench: Bench) -> None:
    bench.lose("p1")
    bench.wait(301.0)
    assert "p1" not in [worker.info.worker_id for worker in bench.coordinator.workers.all()]


# A router that was stopped


def test_a_router_that_was_stopped_extends_what_workers_owe_it(bench: Bench) -> None:
    """Nobody can have answered it meanwhile; one that runs waits no longer for that."""
    _, decode = bench.handed_over()
    bench.stop(3600.0)
    assert bench.phase() is Phase.BINDING
    bench.wait(9.0)
    assert bench.phase() is Phase.BINDING
    bench.wait(1.1)
    assert bench.take(CancelLeg).leg == decode.leg


def test_a_client_s_deadline_goes_on_while_the_router_is_stopped(bench: Bench) -> None:
    bench.decoding(deadline_s=bench.now + 20.0)
    bench.stop(21.0)
    assert isinstance(bench.failed["r"], DeadlineExceeded)
