"""Tests how the end of a worker's session is understood, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.v1 import control_pb2, types_pb2, worker_pb2
from services.core.clock import ManualClock, MonotonicClock
from services.router.coordinator.events import WorkerInfo
from services.router.policy import Fingerprint, Role
from services.router.workers.sessions import SessionTimes, WorkerLink
from tests.support.link_owner import FakeChannel, Owner
from tests.support.patience import HANG_S

SILENCE_S = 0.2


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
    async with asyncio.timeout(HANG_S):
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
    async with asyncio.timeout(HANG_S):
        await heard.get()
        said = await heard.get()
    assert said.load == load
    assert not said.HasField("cache")
    assert not owner.lost.done()
    await link.close()


@pytest.mark.parametrize("speaks", [True, False])
async def test_a_worker_that_says_or_takes_nothing_is_lost(speaks: bool) -> None:
    """Commands to one that takes nothing would pile up here, and what they ask for would never be done."""
    clock = ManualClock()

    class Deaf(FakeChannel):
        async def __aiter__(self) -> AsyncIterator[worker_pb2.SessionResponse]:
            async for message in super().__aiter__() if not speaks else self._for_ever():
                yield message

        async def _for_ever(self) -> AsyncIterator[worker_pb2.SessionResponse]:
            while True:
                yield worker_pb2.SessionResponse(load=self._load, worker=self._worker)
                await asyncio.sleep(0)
                clock.advance(SILENCE_S / 8)

        async def write(self, request: worker_pb2.SessionRequest) -> None:
            if speaks:
                await asyncio.Event().wait()

    info = WorkerInfo(
        "p", Role.PREFILL, 1, Fingerprint("L"), 16, 8, 128, 4, description=control_pb2.WorkerDescription(worker_id="p")
    )
    owner, channel = Owner(), Deaf()
    link = WorkerLink(info, owner, 1, 1, SessionTimes(0.5, SILENCE_S), clock, dial=lambda _: channel)  # type: ignore[arg-type,return-value]
    link.start()
    await owner.opened.wait()
    if not speaks:
        clock.advance(SILENCE_S)
    async with asyncio.timeout(HANG_S):
        assert await owner.lost == (f"{'takes nothing' if speaks else 'silent'} for {SILENCE_S:g} s", True)
    await link.close()


BOTH = [types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE]


def says(*roles: types_pb2.WorkerRole) -> worker_pb2.SessionResponse:
    return worker_pb2.SessionResponse(worker=control_pb2.WorkerDescription(roles=roles))


@pytest.mark.parametrize(
    ("then", "expected"),
    [([says(BOTH[1]), *[says(*BOTH)] * 9], [2, 2]), ([says(BOTH[1]), says(*BOTH)] * 8, [2, 1, 1, 1, 1])],
    ids=["once", "all the time"],
)
async def test_a_role_that_goes_and_comes_back_is_described_again_at_most_once_a_second(
    then: list[worker_pb2.SessionResponse], expected: list[int]
) -> None:
    """Meanwhile the router may have learnt of the end by a refusal. What only repeats is not described again."""
    clock, described, heard = ManualClock(), list[int](), list[Any]()
    all_said = asyncio.Event()

    class Describing(Owner):
        def link_described(self, link: WorkerLink, worker: Any) -> None:
            described.append(len(worker.roles))

        def worker_message(self, link: WorkerLink, message: Any) -> None:
            clock.advance(0.3)
            heard.append(message)
            if len(heard) == 1 + len(then):
                all_said.set()

    channel: Any = FakeChannel(worker=control_pb2.WorkerDescription(roles=BOTH), then=then)
    info = WorkerInfo("m", Role.MIXED, 1, Fingerprint("L"), 16, 8, 128, 4, description=control_pb2.WorkerDescription())
    link = WorkerLink(info, Describing(), 1, 1, SessionTimes(0.5, 1e6), clock, dial=lambda _: channel)
    link.start()
    await all_said.wait()
    await link.close()
    assert described == expected
