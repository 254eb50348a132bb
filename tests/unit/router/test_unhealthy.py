"""Tests workers that are down: a step that does not end, and how one comes back without canaries."""

from __future__ import annotations

from services.core.errors import StepFailed
from services.router.coordinator.events import CancelLeg, LegFailed
from services.router.policy import Role
from services.router.policy.health import Health
from tests.support.router_bench import Bench, started, tokens


def health(bench: Bench, worker_id: str) -> Health:
    return bench.coordinator.workers.get(worker_id).health.state


# A step that does not end


def test_a_stuck_step_is_noticed_although_heartbeats_come() -> None:
    bench = Bench()
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    _, decode = bench.decoding()
    bench.load("d", current_step_ms=29_000)
    assert health(bench, "d") is Health.UP
    bench.load("d", current_step_ms=30_000)
    assert health(bench, "d") is Health.DOWN
    assert bench.take(CancelLeg).leg == decode.leg
    assert not bench.coordinator.workers.get("d").legs
    assert not bench.coordinator.ready
    bench.join("e", Role.DECODE)
    assert bench.take_legs(Role.PREFILL), "it is computed again"
    bench.load("d", current_step_ms=40_000)
    bench.wait(0.9)
    assert health(bench, "d") is Health.DOWN, "as long as it is stuck"
    bench.load("d", current_step_ms=0)
    bench.wait(1.0)
    assert health(bench, "d") is Health.PROBING


def test_three_stuck_workers_are_enough_for_a_request() -> None:
    bench = Bench()
    for worker_id in ("m1", "m2", "m3"):
        bench.join(worker_id, Role.MIXED)
    bench.submit()
    for _ in range(3):
        assert not bench.failed
        bench.load(bench.take_leg(Role.PREFILL).worker_id, current_step_ms=99_000)
    assert bench.failed["r"].reason == "WORKER_FAILED"


# Without canaries


def test_without_canaries_one_request_is_the_probe() -> None:
    bench = Bench()
    bench.join("m", Role.MIXED)
    bench.load("m", current_step_ms=99_000)
    bench.load("m", current_step_ms=0)
    bench.submit("a")
    bench.submit("b")
    assert not bench.take_legs(Role.PREFILL)
    bench.wait(1.0)
    probe = bench.take_leg(Role.PREFILL)
    assert probe.spec.request_id == "a"
    bench.say("m", started(probe), tokens(probe, 1))
    bench.say("m", tokens(bench.take_leg(Role.DECODE), 1, 2))
    assert health(bench, "m") is Health.RISING
    assert bench.take_leg(Role.PREFILL).spec.request_id == "b"


def test_three_failures_in_a_row_take_a_worker_down() -> None:
    bench = Bench()
    bench.join("m", Role.MIXED)
    for number in range(3):
        bench.submit(f"r{number}")
        bench.wait(0.2)
        bench.say("m", LegFailed(bench.take_legs(Role.PREFILL)[-1].leg, StepFailed("x")))
        bench.cancel(f"r{number}")
    assert health(bench, "m") is Health.DOWN


def test_a_session_that_breaks_is_a_failure_even_without_requests() -> None:
    bench = Bench()
    bench.join("m", Role.MIXED)
    bench.lose("m", crashed=False)
    assert health(bench, "m") is Health.UP
    bench.join("m", Role.MIXED)
    bench.lose("m")
    assert health(bench, "m") is Health.SUSPECT
    bench.join("m", Role.MIXED)
    bench.submit()
    assert bench.take_leg(Role.PREFILL).worker_id == "m", "it is used all the same"


def test_tokens_are_successes() -> None:
    bench = Bench()
    bench.join("m", Role.MIXED)
    bench.lose("m")
    bench.join("m", Role.MIXED)
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("m", started(prefill), tokens(prefill, 1))
    assert health(bench, "m") is Health.SUSPECT
    bench.say("m", tokens(bench.take_leg(Role.DECODE), 1))
    assert health(bench, "m") is Health.UP
