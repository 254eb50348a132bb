"""Tests canaries: who is sent one, what its end says of whom, and what that changes for requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.core.errors import (
    BatonError,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    LeaseInvalid,
    SequencePreempted,
    StepFailed,
)
from services.router.coordinator.events import (
    CancelLeg,
    DecodeAdmitted,
    DecodeRefused,
    FinishReason,
    ImportFailed,
    ImportReady,
    LegFailed,
)
from services.router.coordinator.workers import WorkerState
from services.router.policy import Fingerprint, Role
from services.router.policy.health import Health
from tests.support.router_bench import BROKEN, Deep, is_canary, proven_pair, started, tokens


@pytest.fixture
def bench() -> Deep:
    return proven_pair()


# Joining


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_worker_is_checked_before_it_is_used(role: Role) -> None:
    bench = Deep()
    bench.join("w", role)
    canary = bench.canary(role)
    assert (canary.worker_id, canary.max_tokens, canary.remaining_s) == ("w", 1 if role is Role.PREFILL else 2, 10.0)
    assert canary.spec.cache_salt == canary.spec.request_id, "it finds nothing cached, and nobody finds it"
    assert not bench.coordinator.ready
    bench.submit()
    assert not bench.take_legs(role), "nothing is placed on what is new"
    bench.actions.append(canary)
    bench.pass_generation()
    assert bench.health("w") is Health.UP
    assert bench.coordinator.ready == role.can_decode
    assert not bench.take_all(CancelLeg), "what is over needs no cancel"
    assert bench.coordinator.num_live == 1, "a canary is no request"


def test_ready_waits_for_the_first_checks_and_not_for_later_ones() -> None:
    bench = Deep()
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    bench.pass_generation()
    assert not bench.coordinator.ready, "nothing has shown yet that a handoff works"
    bench.pass_transfer()
    assert bench.coordinator.ready
    bench.join("e", Role.DECODE)
    assert bench.coordinator.ready


def test_ready_does_not_wait_for_ever() -> None:
    bench = Deep()
    bench.add("p", Role.PREFILL)
    bench.add("d", Role.DECODE)
    for _ in range(11):
        bench.wait(1.0)
        for command in bench.take_legs(Role.PREFILL):
            bench.say("p", started(command), tokens(command, 7))
        for command in bench.take_legs(Role.DECODE):
            bench.say("d", DecodeRefused(command.leg))
    assert bench.coordinator.ready
    assert bench.pair() is Health.NEW, "a refusal says nothing"


def test_every_pair_is_tried_a_worker_at_a_time() -> None:
    bench = Deep()
    for worker_id, role in (("p", Role.PREFILL), ("m", Role.MIXED), ("n", Role.MIXED), ("d", Role.DECODE)):
        bench.join(worker_id, role)
    bench.pass_generation()
    tried = []
    while commands := bench.take_legs(Role.PREFILL):
        assert len(tried) < 100, "pairs are tried for ever"
        for prefill in commands:
            assert is_canary(prefill)
            bench.say(prefill.worker_id, started(prefill), tokens(prefill, 7))
        decodes = bench.take_legs(Role.DECODE)
        busy = [prefill.worker_id for prefill in commands] + [decode.worker_id for decode in decodes]
        assert len(set(busy)) == len(busy)
        tried += [(str(decode.handoff.source), decode.worker_id) for decode in decodes if decode.handoff]
        for decode in decodes:
            bench.say(decode.worker_id, DecodeAdmitted(decode.leg), ImportReady(decode.leg))
            bench.say(decode.worker_id, tokens(decode, 7, 8, finish=FinishReason.LENGTH))
    pairs = [("p", "m"), ("p", "n"), ("p", "d"), ("m", "n"), ("n", "m"), ("m", "d"), ("n", "d")]
    assert sorted(tried) == sorted(pairs)
    assert bench.coordinator.ready


def test_workers_of_other_layouts_are_no_pair(bench: Deep) -> None:
    bench.add("e", Role.DECODE, fingerprint=Fingerprint("M"))
    bench.wait(1.0)
    assert not bench.take_legs(Role.PREFILL)
    assert [pair.source.worker_id for pair in bench.coordinator.workers.get("e").sources.all()] == []


def test_one_canary_at_a_time(bench: Deep) -> None:
    bench.join("d2", Role.DECODE)
    bench.join("d3", Role.DECODE)
    assert len(bench.take_legs(Role.DECODE)) == 2, "of different workers"
    bench.wait(0.3)
    assert not bench.take_legs(Role.DECODE)


# What they say of a worker


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda leg: LegFailed(leg, StepFailed("x")), 1),
        (lambda leg: LegFailed(leg, BatonError("internal error")), 1),
        (lambda leg: LegFailed(leg, InvalidRequest("token_ids", "too long")), 0),
        (lambda leg: LegFailed(leg, Draining("bye")), 0),
        (lambda leg: LegFailed(leg, SequencePreempted("full")), 0),
        (lambda leg: DecodeAdmitted(leg), 1),  # and then nothing, for 10 s
        (None, 1),
    ],
    ids=["step failed", "internal", "too small for it", "draining", "preempted", "hangs", "no answer"],
)
def test_what_a_generation_says(answer: Callable[[int], Any] | None, expected: int) -> None:
    bench = Deep()
    bench.join("d", Role.DECODE)
    leg = bench.canary(Role.DECODE).leg
    if answer is not None:
        bench.say("d", answer(leg))
    bench.wait(10.0)
    assert bench.coordinator.workers.get("d").health.num_failures == expected


def test_a_worker_that_others_fill_is_not_blamed() -> None:
    bench = Deep()
    bench.join("d", Role.DECODE)
    bench.load("d", num_running=8, blocks_active=64, blocks_free=0)
    canary = bench.canary(Role.DECODE)
    bench.wait(10.0)
    assert bench.health("d") is Health.UP
    assert bench.take(CancelLeg).leg == canary.leg


@pytest.mark.parametrize(("num_running", "expected"), [(2, Health.UP), (1, Health.NEW)])
def test_a_check_that_runs_beside_others_is_no_sooner_done_than_their_steps(num_running: int, expected: Health) -> None:
    """Beside a long prompt on a host with too much to do, each of its few steps takes seconds."""
    bench = Deep()
    bench.join("d", Role.DECODE)
    canary = bench.canary(Role.DECODE)
    bench.say("d", DecodeAdmitted(canary.leg))
    bench.load("d", num_running=num_running)
    bench.wait(10.0)
    assert bench.health("d") is expected
    assert bench.coordinator.workers.get("d").health.num_failures == (expected is not Health.UP)


def test_three_failed_checks_take_a_worker_down_and_two_good_ones_bring_it_back() -> None:
    bench = Deep()
    bench.join("d", Role.DECODE)
    for _ in range(3):
        bench.say("d", LegFailed(bench.canary(Role.DECODE).leg, StepFailed("no")))
        bench.wait(1.0)
    assert bench.health("d") is Health.PROBING
    assert "STEP_FAILED" in bench.coordinator.workers.get("d").health.reason
    bench.pass_generation()
    assert not bench.coordinator.ready
    bench.wait(1.0)
    bench.pass_generation()
    assert bench.health("d") is Health.RISING
    assert bench.coordinator.ready
    bench.wait(11.0)
    assert bench.health("d") is Health.UP


def test_a_suspect_is_checked_while_it_serves(bench: Deep) -> None:
    bench.add("q", Role.PREFILL)
    bench.pass_transfer()
    bench.submit()
    bench.say("p", LegFailed(bench.take_leg(Role.PREFILL).leg, StepFailed("x")))
    assert bench.health("p") is Health.SUSPECT
    assert bench.take_leg(Role.PREFILL).worker_id == "q"
    for _ in range(2):
        bench.wait(1.0)
        bench.pass_generation()
    assert bench.health("p") is Health.UP


def test_a_restarted_worker_is_checked_again(bench: Deep) -> None:
    bench.lose("p")
    bench.join("p", Role.PREFILL, incarnation=2)
    assert bench.health("p") is Health.NEW
    bench.pass_generation()
    assert bench.health("p") is Health.UP
    assert bench.pair() is Health.NEW, "of the other incarnation"
    bench.pass_transfer()


def test_a_session_that_broke_leaves_what_was_proven(bench: Deep) -> None:
    bench.lose("d")
    bench.join("d", Role.DECODE)
    assert (bench.health("d"), bench.pair()) == (Health.SUSPECT, Health.UP)


def test_a_worker_cannot_speak_for_another(bench: Deep) -> None:
    bench.join("e", Role.DECODE)
    canary = bench.canary(Role.DECODE)
    bench.say("d", LegFailed(canary.leg, StepFailed("not mine")), DecodeAdmitted(canary.leg))
    assert (bench.health("d"), bench.health("e")) == (Health.UP, Health.NEW)
    assert bench.take(CancelLeg).worker.worker_id == "d"
    bench.actions.append(canary)
    bench.pass_generation()
    assert bench.health("e") is Health.UP


def test_a_lost_worker_ends_its_canaries(bench: Deep) -> None:
    bench.add("e", Role.DECODE)
    prefill, _ = bench.begin_transfer()
    bench.lose("e")
    assert bench.take(CancelLeg).leg == prefill.leg
    assert bench.health("p") is Health.UP
    bench.wait(30.0)
    assert bench.health("p") is Health.UP


# What they say of a pair


def test_a_pair_that_cannot_transfer_is_not_paired(bench: Deep) -> None:
    bench.add("e", Role.DECODE)
    for _ in range(3):
        bench.fail_transfer()
        bench.take_all(CancelLeg)
        bench.wait(0.9)
    assert bench.pair("p", "e") is Health.DOWN
    assert (bench.health("p"), bench.health("e"), bench.pair("p", "d")) == (Health.UP, Health.UP, Health.UP)
    bench.load("d", blocks_free=20, blocks_active=44, num_running=7)
    _, decode = bench.handed_over()
    assert decode.worker_id == "d", "however much freer the other is"


def test_with_no_pair_that_works_the_whole_of_it_runs_on_a_decode_worker() -> None:
    bench = Deep()
    bench.add("p", Role.PREFILL)
    bench.add("d", Role.DECODE)
    for _ in range(3):
        bench.fail_transfer()
        bench.wait(0.9)
    bench.submit()
    whole = bench.take_leg(Role.DECODE)
    assert (whole.worker_id, whole.handoff) == ("d", None)


def test_an_unproven_pair_is_used_while_there_is_no_other() -> None:
    bench = Deep()
    bench.add("p", Role.PREFILL)
    bench.add("d", Role.DECODE)
    assert is_canary(bench.take_leg(Role.PREFILL))
    bench.submit()
    request = bench.take_leg(Role.PREFILL)
    assert not is_canary(request), "the first request waits for nothing"
    bench.say("p", started(request))
    decode = bench.take_leg(Role.DECODE)
    bench.say("d", DecodeAdmitted(decode.leg), ImportReady(decode.leg))
    assert bench.pair() is Health.UP, "a request's transfer proves as much"


def test_a_request_whose_import_fails_makes_a_canary_look_at_the_pair(bench: Deep) -> None:
    bench.add("e", Role.DECODE)
    bench.pass_transfer()
    bench.take_all(CancelLeg)
    prefill, decode = bench.handed_over()
    assert decode.worker_id == "d"
    bench.say("d", DecodeAdmitted(decode.leg), ImportFailed(decode.leg, True, BROKEN))
    assert bench.pair() is Health.SUSPECT
    assert bench.take_leg(Role.DECODE).worker_id == "e"
    bench.wait(0.3)
    _, check = bench.begin_transfer()
    assert check.worker_id == "d"
    assert not bench.take_all(CancelLeg), "the request's own lease lives"
    bench.say("e", LegFailed(prefill.leg, StepFailed("unknown leg")))


@pytest.mark.parametrize("error", [LeaseInvalid("over"), Draining("bye")])
def test_what_is_not_the_pairs_fault(bench: Deep, error: BatonError) -> None:
    bench.add("e", Role.DECODE)
    bench.fail_transfer(error)
    assert bench.pair("p", "e") is Health.NEW
    assert bench.coordinator.workers.get("p").state is (
        WorkerState.DRAINING if isinstance(error, Draining) else WorkerState.READY
    )


@pytest.mark.parametrize("who_notices", ["router", "worker"])
def test_a_transfer_that_hangs(bench: Deep, who_notices: str) -> None:
    """The worker has the same limit, and may be the first to say that it has passed. Its own health does not suffer."""
    bench.add("e", Role.DECODE)
    prefill, decode = bench.begin_transfer()
    bench.say("e", DecodeAdmitted(decode.leg))
    if who_notices == "router":
        bench.wait(10.0)
    else:
        bench.say("e", LegFailed(decode.leg, DeadlineExceeded("the deadline passed on the decode worker")))
    assert [cancel.leg for cancel in bench.take_all(CancelLeg)] == [prefill.leg, decode.leg]
    pair = bench.coordinator.workers.get("e").sources.get(bench.infos["p"])
    assert pair is not None
    assert (pair.health.num_failures, pair.health.reason) == (1, "no transfer within 10 s")
    assert bench.coordinator.workers.get("e").health.num_failures == 0


def test_a_worker_that_opens_a_second_lease_for_a_canary_has_failed() -> None:
    """Each lease would make one more decode leg, of which nobody would hear the end."""
    bench = Deep()
    bench.add("p", Role.PREFILL)
    bench.add("d", Role.DECODE)
    prefill = bench.canary(Role.PREFILL)
    bench.say("p", *[started(prefill)] * 1000)
    decode = bench.take_leg(Role.DECODE)
    assert {cancel.leg for cancel in bench.take_all(CancelLeg)} == {prefill.leg, decode.leg}
    assert bench.coordinator.workers.get("p").health.reason == "canary: PROTOCOL_VIOLATION: a second lease"


@pytest.mark.parametrize("phase", [Role.PREFILL, Role.DECODE])
def test_an_answer_beyond_what_was_asked_is_not_kept(phase: Role) -> None:
    bench = Deep()
    bench.join("w", phase)
    command = bench.canary(phase)
    if phase is Role.PREFILL:
        bench.say("w", started(command))
    bench.say("w", tokens(command, *range(1, 8001)))
    assert bench.take(CancelLeg).leg == command.leg
    assert (
        bench.coordinator.workers.get("w").health.reason == "canary: PROTOCOL_VIOLATION: tokens beyond those asked for"
    )
