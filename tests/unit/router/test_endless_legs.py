"""Tests that no worker keeps a request for ever, whatever it says of a leg, and however often it says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.v1 import types_pb2
from services.core.errors import LeaseInvalid, WorkerFailed
from services.router.coordinator.events import (
    DecodeAdmitted,
    DecodeRefused,
    FinishReason,
    ImportFailed,
    ImportReady,
    LeaseEnd,
    LeaseEnded,
    LegEvent,
    SendLeg,
    Tokens,
)
from services.router.policy import Role
from tests.support.router_bench import Bench, started, tokens


def released_unsealed(bench: Bench, leg: SendLeg) -> None:
    """The source says that its lease was released, before it has computed the prompt."""
    if leg.phase is Role.PREFILL:
        bench.say("p", started(leg))  # a turn of its own: the lease is offered
        bench.say("p", LeaseEnded(leg.leg, LeaseEnd.RELEASED))
    else:
        bench.say("d", DecodeAdmitted(leg.leg), ImportFailed(leg.leg, lease_alive=False, error=LeaseInvalid("gone")))


def refused_when_ready(bench: Bench, leg: SendLeg) -> None:
    """The destination says that it has all blocks, and then that it has no room."""
    events = [started(leg)] if leg.phase is Role.PREFILL else [ImportReady(leg.leg), DecodeRefused(leg.leg)]
    bench.say(leg.worker_id, *events)


def left_and_back(bench: Bench, leg: SendLeg) -> None:
    """The source ends its session in order whenever it has a prompt, and comes back."""
    if leg.phase is Role.PREFILL:
        bench.say("p", started(leg))
        bench.lose("p", crashed=False)
        bench.coordinator.worker_joined(bench.infos["p"], bench.now)
        bench.coordinator.session_opened("p", 1, bench.now)
    else:
        bench.say("d", ImportFailed(leg.leg, lease_alive=False, error=LeaseInvalid("gone")))


@pytest.mark.parametrize("lie", [released_unsealed, refused_when_ready, left_and_back])
def test_a_prompt_is_not_computed_for_ever(lie: Callable[[Bench, SendLeg], None]) -> None:
    bench = Bench()
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    bench.submit()
    for _ in range(200):
        if "r" in bench.failed:
            break
        for leg in bench.take_all(SendLeg):
            if leg.leg in bench.coordinator.workers.get(leg.worker_id).legs:
                lie(bench, leg)
        bench.wait(0.5)
        for worker_id in bench.infos:
            bench.load(worker_id)
    assert isinstance(bench.failed.get("r"), WorkerFailed), "it is tried for ever"


def test_refusals_of_what_never_began_are_not_counted() -> None:
    """A whole request waits for room at a decode worker that refuses it time and again."""
    bench = Bench(max_fruitless_starts=4, queue_timeout_s=1000.0)
    bench.join("d", Role.DECODE)
    bench.submit()
    num_refusals, began_s = 0, bench.now
    while num_refusals < 20:
        assert bench.now - began_s < 1000.0, "it is tried no more"
        for leg in bench.take_legs(Role.DECODE):
            bench.say("d", DecodeRefused(leg.leg))
            num_refusals += 1
        bench.load("d")
        bench.wait(0.5)
    assert "r" not in bench.failed


@pytest.mark.parametrize(
    "again",
    [
        lambda leg: DecodeAdmitted(leg.leg),
        lambda leg: ImportReady(leg.leg),
        lambda leg: tokens(leg, 100),
        lambda leg: Tokens(leg.leg, 1, ()),
    ],
)
def test_a_worker_that_only_repeats_itself_is_silent(again: Callable[[SendLeg], LegEvent]) -> None:
    bench = Bench()
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    _, decode = bench.decoding()
    for _ in range(50):
        bench.wait(5.0)
        bench.load("d", num_running=1, blocks_active=4)
        bench.say("d", again(decode))
    assert decode.leg not in bench.coordinator.workers.get("d").legs, "it goes on for ever"


def test_what_a_released_leg_measured_is_kept_once() -> None:
    bench = Bench()
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    prefill, decode = bench.decoding()
    measured = replace(tokens(prefill, 100), timings=types_pb2.PhaseTimings(prefill_wait_ms=1.0))
    for _ in range(10):
        bench.say("p", measured)
    bench.say("d", tokens(decode, 101, at=1, finish=FinishReason.STOP))
    assert len(bench.finished["r"].summary.worker_timings) <= 1
