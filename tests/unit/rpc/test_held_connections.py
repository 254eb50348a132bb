"""Tests that of connections on which calls only wait for their clients, those that have done so for longest are given
up first."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator

import pytest

from services.core.errors import Cancelled, Overloaded
from services.rpc import call_limits
from services.rpc.call_limits import OpenCalls

MOST_HELD = 8


class Clients:
    """Keeps calls open, each on the connection that it names, until `leave`."""

    def __init__(self) -> None:
        self.calls = OpenCalls(10_000, 1_000, MOST_HELD)
        self.evicted: list[str] = []
        self._leave = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def wait(self, name: str, connection: str) -> None:
        """The client of this one does not read."""
        self._tasks.append(asyncio.create_task(self._call(name, connection, waits=True)))
        await asyncio.sleep(0)

    async def work(self, name: str, connection: str) -> None:
        self._tasks.append(asyncio.create_task(self._call(name, connection, waits=False)))
        await asyncio.sleep(0)

    async def _call(self, name: str, connection: str, *, waits: bool) -> None:
        try:
            async with self.calls.open(connection) as call:
                with call.unread() if waits else contextlib.nullcontext():
                    await self._leave.wait()
        except Overloaded:
            self.evicted.append(name)

    async def leave(self) -> None:
        self._leave.set()
        await asyncio.gather(*self._tasks)


@pytest.fixture
async def clients(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Clients]:
    monkeypatch.setattr(call_limits, "GRACE_S", 0.05)
    clients = Clients()
    yield clients
    await clients.leave()


async def sweeps(number: int) -> None:
    await asyncio.sleep((number + 0.5) * 0.05)


async def test_a_connection_that_the_server_works_for_loses_no_call(clients: Clients) -> None:
    """What waits on it does not matter, as behind a proxy: it would stay open all the same."""
    await clients.work("proxy works", "proxy")
    for number in range(50):
        await clients.wait(f"proxy {number}", "proxy")
    for number in range(MOST_HELD + 3):
        await clients.wait(f"stranger {number}", f"stranger {number}")
    await sweeps(4)
    assert sorted(clients.evicted) == ["stranger 0", "stranger 1", "stranger 2"]


async def test_all_calls_of_a_connection_go_and_no_more_connections_than_must(clients: Clients) -> None:
    for number in range(MOST_HELD + 1):
        for call in range(3):
            await clients.wait(f"{number}.{call}", f"stranger {number}")
    await sweeps(4)
    assert sorted(clients.evicted) == ["0.0", "0.1", "0.2"]


async def test_what_has_begun_to_wait_since_the_last_look_is_left_alone(clients: Clients) -> None:
    """Calls whose messages a late event loop has not read yet would be ended else."""
    for number in range(MOST_HELD + 1):
        await clients.wait(str(number), f"stranger {number}")
    await sweeps(1)
    assert clients.evicted == []
    await sweeps(1)
    assert clients.evicted == ["0"]


async def test_a_call_is_ended_once_by_whatever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer takes a call's room in the turn in which the call is given up, and the other way round."""
    monkeypatch.setattr(call_limits, "WRITE_WITHIN_S", 0.0)
    for gives_up_first in (True, False):
        calls, ends = OpenCalls(2, 8, 8), list[str]()

        async def stuck(calls: OpenCalls, ends: list[str]) -> None:
            try:
                async with calls.open("peer") as call:
                    with call.writing():
                        await asyncio.Event().wait()
            except (Cancelled, Overloaded) as error:
                ends.append(type(error).__name__)

        tasks = [asyncio.create_task(stuck(calls, ends)) for _ in range(2)]
        await asyncio.sleep(0)
        steps = [calls._give_up, calls._make_room]
        monkeypatch.setattr(call_limits, "GRACE_S", 0.0)
        steps[0 if gives_up_first else 1]()
        with contextlib.suppress(Overloaded):  # nobody is left to be ended
            steps[1 if gives_up_first else 0]()
        await asyncio.gather(*tasks)
        assert ends == (["Cancelled", "Cancelled"] if gives_up_first else ["Overloaded", "Cancelled"])
        assert not len(calls)


async def test_a_call_leaves_nothing_for_the_garbage_collector() -> None:
    calls = OpenCalls(2, 8, 8)
    async with calls.open("peer") as call:
        with call.writing():
            pass
    gone, _ = weakref.ref(call), gc.disable()
    try:
        del call
        assert gone() is None
    finally:
        gc.enable()
