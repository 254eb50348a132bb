"""Tests that a worker's roles may change while it runs: it says so in its session, and what it has goes on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from services.core.errors import RoleGone
from services.router.coordinator.events import DecodeAdmitted, FinishReason, ImportReady, LegFailed
from services.router.policy import Role
from services.router.policy.health import HealthConfig
from services.router.workers.drains import Drains
from tests.support.router_bench import Bench, started, tokens


def change(bench: Bench, worker_id: str, roles: Role) -> None:
    info = bench.infos[worker_id] = replace(bench.infos[worker_id], roles=roles)
    bench.coordinator.worker_described(info, bench.now)
    bench.wait(0.0)


def test_a_worker_takes_the_legs_of_its_new_role_and_no_more_of_the_old_one() -> None:
    bench = Bench()
    bench.join("m", Role.MIXED)
    bench.join("p", Role.PREFILL)
    bench.load("p", num_waiting=9, queued_prefill_tokens=900, blocks_active=40, blocks_free=24)
    bench.submit("before")
    prefill = bench.take_leg(Role.PREFILL)
    assert prefill.worker_id == "m", "it has less to do"
    change(bench, "m", Role.DECODE)
    bench.submit("after")
    assert bench.take_leg(Role.PREFILL).worker_id == "p"
    bench.say("m", started(prefill), tokens(prefill, 7))
    decode = bench.take_leg(Role.DECODE)
    assert decode.worker_id == "m", "the prefill that it had goes on, and is decoded in place"
    bench.say("m", DecodeAdmitted(decode.leg), ImportReady(decode.leg), tokens(decode, 7))
    bench.say("m", tokens(decode, 8, at=1, finish=FinishReason.STOP))
    assert bench.output["before"] == [7, 8]


def test_a_command_for_a_role_that_is_gone_counts_against_nobody() -> None:
    """The router learns of it by the refusal, before the worker registers again, and places the prompt elsewhere."""
    bench = Bench(max_crashes=1)
    bench.join("m", Role.MIXED)
    bench.join("p", Role.PREFILL)
    bench.load("p", num_waiting=9, queued_prefill_tokens=900, blocks_active=40, blocks_free=24)
    for name in ("a", "b", "c", "d"):
        bench.submit(name)
    refused = [leg for leg in bench.take_legs(Role.PREFILL) if leg.worker_id == "m"]
    assert len(refused) > 1
    for leg in refused:
        bench.say("m", LegFailed(leg.leg, RoleGone("this worker takes no prefill commands")))
    assert [leg.worker_id for leg in bench.take_legs(Role.PREFILL)] == ["p"] * len(refused)
    worker = bench.coordinator.workers.get("m")
    assert worker.info.roles is Role.DECODE
    assert worker.health.usable
    assert not bench.failed


def test_a_worker_without_any_role_is_leaving() -> None:
    bench = Bench()
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    bench.submit()
    leg = bench.take_leg(Role.PREFILL)
    bench.say("p", LegFailed(leg.leg, RoleGone("this worker takes no prefill commands")))
    assert not bench.take_legs(Role.PREFILL)
    assert bench.coordinator.workers.get("p").draining


def test_a_request_that_nobody_could_serve_is_placed_at_once() -> None:
    """It does not wait for the tick."""
    bench = Bench()
    bench.join("w", Role.PREFILL)
    bench.submit()
    assert not bench.take_legs(Role.PREFILL)
    bench.infos["w"] = replace(bench.infos["w"], roles=Role.MIXED)
    bench.coordinator.worker_described(bench.infos["w"], bench.now)
    bench.say("w")
    assert bench.take_leg(Role.PREFILL).worker_id == "w"


def test_pairs_follow_the_roles() -> None:
    bench = Bench(health=HealthConfig(canaries=False))
    for worker_id, roles in (("a", Role.PREFILL), ("b", Role.DECODE)):
        bench.join(worker_id, roles)

    def pairs() -> set[tuple[str, str]]:
        workers = bench.coordinator.workers.all()
        return {(pair.source.worker_id, each.info.worker_id) for each in workers for pair in each.sources.all()}

    assert pairs() == {("a", "b")}
    change(bench, "a", Role.MIXED)
    assert pairs() == {("a", "b")}
    change(bench, "b", Role.MIXED)
    assert pairs() == {("a", "b"), ("b", "a")}
    change(bench, "a", Role.DECODE)
    assert pairs() == {("b", "a")}
    change(bench, "b", Role.PREFILL)
    assert pairs() == {("b", "a")}
    bench.submit()
    assert bench.take_leg(Role.PREFILL).worker_id == "b"


def test_a_draining_worker_that_changes_its_roles_is_asked_to_leave_again() -> None:
    """Its description is another record then; it is known by its name and its incarnation."""
    bench = Bench()
    bench.join("w", Role.PREFILL)
    asked: list[float] = []
    link: Any = SimpleNamespace(info=bench.infos["w"], send_leave=asked.append)
    nobody_waits: Any = None
    drains = Drains(bench.coordinator, bench.clock, lambda: None, nobody_waits)
    drains.link_opened(link)
    assert not asked
    bench.coordinator.drain("w", bench.now)
    change(bench, "w", Role.MIXED)
    drains.link_opened(link)
    assert len(asked) == 1


@pytest.mark.parametrize(("before", "after"), [(Role.MIXED, Role.DECODE), (Role.MIXED, Role.PREFILL)])
def test_a_worker_that_is_back_with_other_roles_has_the_pairs_of_these_alone(before: Role, after: Role) -> None:
    """The same process was lost meanwhile. A pair of a role that it has no more would be probed and blamed for ever."""
    bench = Bench()
    for worker_id, roles in (("w", before), ("p", Role.PREFILL), ("d", Role.DECODE)):
        bench.join(worker_id, roles)
    bench.lose("w", crashed=False)
    bench.infos["w"] = replace(bench.infos["w"], roles=after)
    assert bench.coordinator.worker_joined(bench.infos["w"], bench.now)
    bench.coordinator.session_opened("w", 1, bench.now)
    workers = bench.coordinator.workers.all()
    pairs = {(pair.source.worker_id, each.info.worker_id) for each in workers for pair in each.sources.all()}
    assert pairs == {("p", "d"), ("p", "w") if after is Role.DECODE else ("w", "d")}
