"""Tests the coordinator and workers that leave in order: whatever fails for that counts for nothing, and nothing is
lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.core.errors import BatonError, Draining, LeaseInvalid, TransferFailed, WorkerIdInUse
from services.router.coordinator.events import (
    DecodeAdmitted,
    FinishReason,
    ImportFailed,
    ImportReady,
    LegFailed,
    SendLeg,
    Tokens,
)
from services.router.coordinator.workers import WorkerState
from services.router.policy import Role
from services.router.policy.health import Health
from tests.support.router_bench import Bench, started, tokens, two_of_each

MANY = range(2, 9)
"""More than three."""


@pytest.fixture
def bench() -> Bench:
    return two_of_each()


def finish(bench: Bench, prefill: SendLeg) -> int:
    """Runs the request to its end; how often it was placed again."""
    bench.say(prefill.worker_id, started(prefill))
    decode = bench.take_leg(Role.DECODE)
    bench.say(decode.worker_id, DecodeAdmitted(decode.leg))
    bench.say(prefill.worker_id, tokens(prefill, 100))
    bench.say(decode.worker_id, ImportReady(decode.leg))
    bench.say(decode.worker_id, tokens(decode, 100, finish=FinishReason.STOP))
    bench.assert_idle()
    return bench.finished["r"].summary.num_retries


def test_a_prompt_that_crosses_the_news_is_only_refused(bench: Bench) -> None:
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p1", LegFailed(prefill.leg, Draining("bye")))
    assert bench.coordinator.workers.get("p1").state is WorkerState.DRAINING
    assert finish(bench, bench.take_leg(Role.PREFILL)) == 0


def test_a_handoff_that_crosses_the_news_is_only_refused(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say("d1", LegFailed(decode.leg, Draining("bye")))
    again = bench.take_leg(Role.DECODE)
    assert (again.worker_id, again.handoff) == ("d2", decode.handoff)
    bench.say("d2", DecodeAdmitted(again.leg))
    bench.say("p1", tokens(prefill, 100))
    bench.say("d2", ImportReady(again.leg))
    bench.say("d2", tokens(again, 100, finish=FinishReason.STOP))
    assert bench.finished["r"].summary.num_retries == 0


@pytest.mark.parametrize("is_known", [False, True])
def test_a_handoff_that_crosses_the_end_of_the_session_is_only_refused(bench: Bench, is_known: bool) -> None:
    """A worker that ends its session in order has finished what it had begun: it never read what it did not answer."""
    prefill, decode = bench.handed_over()
    if is_known:
        bench.load("d1", draining=True)
    bench.lose("d1", crashed=False)
    again = bench.take_leg(Role.DECODE)
    assert (again.worker_id, again.handoff) == ("d2", decode.handoff)
    bench.say("d2", DecodeAdmitted(again.leg))
    bench.say("p1", tokens(prefill, 100))
    bench.say("d2", ImportReady(again.leg))
    bench.say("d2", tokens(again, 100, finish=FinishReason.STOP))
    assert bench.finished["r"].summary.num_retries == 0


def test_a_prompt_that_crosses_the_end_of_the_session_is_only_refused(bench: Bench) -> None:
    bench.submit()
    for worker_id in ("p1", "p2"):
        assert bench.take_leg(Role.PREFILL).worker_id == worker_id
        bench.lose(worker_id, crashed=False)
        bench.join(worker_id, Role.PREFILL, incarnation=2)
    assert finish(bench, bench.take_leg(Role.PREFILL)) == 0


def test_what_had_begun_at_a_worker_that_leaves_is_placed_again(bench: Bench) -> None:
    # As at the end of the time that it had for what ran.
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.say(prefill.worker_id, started(prefill))
    bench.take_leg(Role.DECODE)
    bench.lose(prefill.worker_id, crashed=False)
    bench.wait(3.0)
    assert finish(bench, bench.take_leg(Role.PREFILL)) == 1


@pytest.mark.parametrize(
    ("error", "known"),
    [(Draining("its worker leaves"), False), (LeaseInvalid("aborted"), True), (TransferFailed("broke off"), True)],
    ids=["the source says so", "known before, lease dead", "known before, connection gone"],
)
def test_an_import_that_fails_because_its_source_leaves_counts_for_nothing(
    bench: Bench, error: BatonError, known: bool
) -> None:
    """A decode worker may report it before the router has heard of the end of the source's session."""
    bench.submit()
    for incarnation in MANY:
        prefill = bench.take_leg(Role.PREFILL)
        bench.say(prefill.worker_id, started(prefill))
        decode = bench.take_leg(Role.DECODE)
        if known:
            bench.load(prefill.worker_id, draining=True)
        bench.say(decode.worker_id, DecodeAdmitted(decode.leg), ImportFailed(decode.leg, False, error))
        assert bench.coordinator.workers.get(prefill.worker_id).state is WorkerState.DRAINING
        assert bench.coordinator.workers.get(decode.worker_id).state is WorkerState.READY
        bench.lose(prefill.worker_id, crashed=False)
        bench.join(prefill.worker_id, Role.PREFILL, incarnation=incarnation)
    assert not bench.failed
    assert all(
        pair.health.state in (Health.UP, Health.NEW)
        for worker in bench.coordinator.workers.all()
        for pair in worker.sources.all()
    )


def test_a_dead_source_that_was_leaving_is_not_asked_for_ever(bench: Bench) -> None:
    """Its lease is said to be alive, but nothing comes: the prompt runs elsewhere."""
    prefill, decode = bench.handed_over()
    bench.load("p1", draining=True)
    for _ in range(2):
        bench.say(decode.worker_id, DecodeAdmitted(decode.leg))
        bench.say(decode.worker_id, ImportFailed(decode.leg, True, TransferFailed("silent")))
        bench.wait(1.0)
        bench.load("d1")
        bench.load("d2")
        if again := bench.take_legs(Role.DECODE):
            [decode] = again
    assert bench.take_leg(Role.PREFILL).worker_id == "p2"
    assert prefill.worker_id == "p1"


@pytest.mark.parametrize("asks_too_early", [False, True])
def test_the_loss_of_a_worker_that_leaves_counts_for_nothing(bench: Bench, asks_too_early: bool) -> None:
    """The way in which it goes does not matter: its last connection may break before the end of its session is read."""
    bench.submit()
    for incarnation in MANY:
        prefill = bench.take_leg(Role.PREFILL)
        bench.load(prefill.worker_id, draining=True)
        if asks_too_early:  # its successor is there before the end of the session is seen
            successor = replace(bench.infos[prefill.worker_id], incarnation=incarnation)
            with pytest.raises(WorkerIdInUse):
                bench.coordinator.worker_joined(successor, bench.now)
        bench.lose(prefill.worker_id)
        bench.join(prefill.worker_id, Role.PREFILL, incarnation=incarnation)
    assert not bench.failed
    assert all(worker.health.state is Health.UP for worker in bench.coordinator.workers.all())


def test_an_aborted_lease_and_the_loss_of_its_source_are_one_failure() -> None:
    """Its session was lost at its end first: the lease is gone, and the prompt may go there again, before the router
    notices."""
    bench = Bench()
    bench.join("p1", Role.PREFILL)
    bench.join("d1", Role.DECODE)
    bench.submit()
    for incarnation in (2, 3):
        prefill = bench.take_leg(Role.PREFILL)
        bench.say("p1", started(prefill))
        decode = bench.take_leg(Role.DECODE)
        bench.say("d1", DecodeAdmitted(decode.leg))
        bench.say("d1", ImportFailed(decode.leg, False, LeaseInvalid("aborted")))
        assert len(bench.take_legs(Role.PREFILL)) == (incarnation == 2), "its last chance is not risked at once"
        bench.lose("p1")
        bench.join("p1", Role.PREFILL, incarnation=incarnation)
        bench.wait(1.0)
        if whole := bench.take_legs(Role.DECODE):  # with no prefill worker in sight
            bench.say("d1", LegFailed(whole[0].leg, Draining("bye")))
            bench.lose("d1")
            bench.join("d1", Role.DECODE, incarnation=incarnation)
    assert "r" not in bench.failed, "two failures, not four"
    bench.take_leg(Role.PREFILL)
    bench.lose("p1")
    assert "r" in bench.failed


def test_a_late_word_of_a_leg_that_was_migrated_changes_nothing(bench: Bench) -> None:
    _, decode = bench.decoding()
    assert bench.migrate("d1") == 1
    replay = bench.take_leg(Role.PREFILL)
    bench.say("d1", Tokens(decode.leg, 1, (101,)))
    assert bench.output["r"] == [100]
    assert replay.token_ids[-1] == 100


def test_only_one_that_ended_its_session_in_order_has_left(bench: Bench) -> None:
    """Both are remembered, since they may come back with room for requests that are long."""
    bench.lose("p1", crashed=False)
    bench.lose("d1", crashed=True)
    bench.coordinator.drain("p2", bench.now)
    bench.lose("p2", crashed=True)
    states = {worker.info.worker_id: worker.state for worker in bench.coordinator.workers.all()}
    lost, left = WorkerState.LOST, WorkerState.LEFT
    assert states == {"p1": left, "d1": lost, "p2": lost, "d2": WorkerState.READY}
    bench.wait(301.0)
    assert {worker.info.worker_id for worker in bench.coordinator.workers.all()} == {"d2"}
