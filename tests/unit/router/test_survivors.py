"""Tests whom a claim holds off and what waits for a worker: deliberate bugs broke these rules unseen."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.v1 import control_pb2, worker_pb2
from services.core.clock import MonotonicClock
from services.router.coordinator.events import WorkerInfo
from services.router.policy import Fingerprint, Role
from services.router.workers.sessions import _MOST_OUTGOING, SessionTimes, WorkerLink
from tests.support.link_owner import FakeChannel, Owner
from tests.support.router_bench import Bench, started


@pytest.mark.parametrize(("priority", "takes_it"), [(1, True), (0, False)])
def test_a_handoff_before_the_claimant_takes_the_room_that_it_claims(priority: int, *, takes_it: bool) -> None:
    """Checks that a handoff leaves alone only the claims of those that come before it."""
    bench = Bench()
    for worker_id, role, free in (("p", Role.PREFILL, 10), ("d1", Role.DECODE, 2), ("d2", Role.DECODE, 1)):
        bench.join(worker_id, role)
        bench.load(worker_id, blocks_active=64 - free, blocks_free=free, num_running=1)
    bench.submit("claimant", 400)
    bench.wait(1.2)
    bench.submit("handoff", 20, priority=priority)
    prefill = bench.take_leg(Role.PREFILL)
    assert prefill.spec.request_id == "handoff"
    bench.say("p", started(prefill))
    assert not bench.take_legs(Role.DECODE)
    bench.load("d1", blocks_active=60, blocks_free=4)
    assert [leg.worker_id for leg in bench.take_legs(Role.DECODE)] == (["d1"] if takes_it else [])


async def test_a_worker_for_which_too_much_waits_is_lost() -> None:
    description = control_pb2.WorkerDescription(worker_id="w", address="nowhere:1")
    info = WorkerInfo("w", Role.PREFILL, 1, Fingerprint("L"), 16, 64, 1024, 8, host_id="h", description=description)
    owner, channel = Owner(), FakeChannel()
    no: Any = channel
    link = WorkerLink(info, owner, 1, 1, SessionTimes(0.5, 5.0), MonotonicClock(), lambda _: no)
    for leg in range(_MOST_OUTGOING + 1):
        link.send(worker_pb2.SessionRequest(cancel=worker_pb2.CancelLeg(leg=leg)))
    link.start()
    try:
        async with asyncio.timeout(60.0):
            reason, crashed = await owner.lost
    finally:
        await link.close()
    assert (reason, crashed) == (f"{_MOST_OUTGOING + 1} messages to it wait to be written", True)
