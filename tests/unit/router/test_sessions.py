"""Tests how the end of a worker's session is understood, and what ends it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.v1 import control_pb2, types_pb2, worker_pb2
from services.core.clock import ManualClock, MonotonicClock
from services.router.coordinator.events import WorkerInfo
from services.router.policy import Fingerprint, Role
from services.router.workers.sessions import SessionTimes, WorkerLink
from tests.support.link_owner import FakeChannel, Owner


@pytest.mark.parametrize(
    ("draining", "told", "details", "crashed"),
    [
        (True, False, "Internal error from Core", False),
        (False, True, "Internal error from Core", False),
        (False, False, "Internal error from Core", True),
        (True, True, "a defect", True),
    ],
    ids=["it said that it leaves", "it was told to", "out of nowhere", "a defect of the worker"],
)
async def test_a_write_that_meets_the_end_of_a_leaving_worker(
    draining: bool, told: bool, details: str, crashed: bool
) -> None:
    owner = Owner()
    info = WorkerInfo(
        "p", Role.PREFILL, 1, Fingerprint("L"), 16, 8, 128, 4, description=control_pb2.WorkerDescription(worker_id="p")
    )
    channel: Any = FakeChannel(types_pb2.LoadSnapshot(sequence_number=1, draining=draining), failure=details)
    link = WorkerLink(info, owner, 1, 1, SessionTimes(0.5, 2.0), MonotonicClock(), dial=lambda _: channel)
    if told:
        link.send_leave(5.0)
    link.start()
    assert (await owner.lost)[1] is crashed
    await link.close()


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([{"number": 2, "whole": True}], "its cache events have the number 2, not 1"),
        ([{"number": 1}], "its first cache events are not of the whole cache"),
        ([{"number": 1, "whole": True}, {"number": 3}], "its cache events have the number 3, not 2"),
        ([{"number": 1, "whole": True}, {"number": 1, "whole": True}], "its cache events have the number 1, not 2"),
        ([{"number": 1, "whole": True, "stored": bytes(9)}], "it sent a part of a hash"),
    ],
    ids=["the first is missing", "not all of it", "one is missing", "twice", "half a hash"],
)
async def test_events_of_a_cache_that_cannot_be_followed_end_the_session(
    events: list[dict[str, Any]], reason: str
) -> None:
    owner = Owner()
    info = WorkerInfo(
        "p", Role.PREFILL, 1, Fingerprint("L"), 16, 8, 128, 4, description=control_pb2.WorkerDescription(worker_id="p")
    )
    channel: Any = FakeChannel(
        then=[worker_pb2.SessionResponse(cache=worker_pb2.CacheEvents(**each)) for each in events]
    )
    link = WorkerLink(
        info, owner, 1, 1, SessionTimes(0.5, 5.0), MonotonicClock(), dial=lambda _: channel, follows_cache=True
    )
    link.start()
    async with asyncio.timeout(3.0):
        said, crashed = await owner.lost
    assert reason in said
    assert crashed
    await link.close()


async def test_events_of_a_cache_that_nobody_asked_for_are_left_out() -> None:
    """A router that does not follow caches neither judges what it is told of them nor passes it on."""
    owner, heard = Owner(), asyncio.Queue[worker_pb2.SessionResponse]()
    owner.worker_message = lambda link, message: heard.put_nowait(message)  # type: ignore[method-assign]
    info = WorkerInfo(
        "p", Role.PREFILL, 1, Fingerprint("L"), 16, 8, 128, 4, description=control_pb2.WorkerDescription(worker_id="p")
    )
    load = types_pb2.LoadSnapshot(sequence_number=2, num_running=3)
    nonsense = worker_pb2.CacheEvents(number=(1 << 64) - 1, stored=b"half a hash")
    channel: Any = FakeChannel(then=[worker_pb2.SessionResponse(load=load, cache=nonsense)])
    link = WorkerLink(info, owner, 1, 1, SessionTimes(0.5, 5.0), MonotonicClock(), dial=lambda _: channel)
    link.start()
    async with asyncio.timeout(3.0):
        await heard.get()
        said = await heard.get()
    assert said.load == load
    assert not said.HasField("cache")
    assert not owner.lost.done()
    await link.close()


async def test_a_role_that_comes_back_before_its_end_was_taken_over_is_described_again() -> None:
    """Meanwhile the router may have learnt of the end by a refusal. What only repeats is not described again."""
    both = [types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE]
    clock, described = ManualClock(), list[int]()

    def says(*roles: types_pb2.WorkerRole) -> worker_pb2.SessionResponse:
        return worker_pb2.SessionResponse(worker=control_pb2.WorkerDescription(roles=roles))

    class Describing(Owner):
        def link_described(self, link: WorkerLink, worker: Any) -> None:
            described.append(len(worker.roles))

        def worker_message(self, link: WorkerLink, message: Any) -> None:
            clock.advance(0.3)

    channel: Any = FakeChannel(
        worker=control_pb2.WorkerDescription(roles=both), then=[says(both[1]), *[says(*both)] * 9]
    )
    info = WorkerInfo("m", Role.MIXED, 1, Fingerprint("L"), 16, 8, 128, 4, description=control_pb2.WorkerDescription())
    link = WorkerLink(info, Describing(), 1, 1, SessionTimes(0.5, 1e6), clock, dial=lambda _: channel)
    link.start()
    await asyncio.sleep(0.1)
    await link.close()
    assert described == [2, 2]
