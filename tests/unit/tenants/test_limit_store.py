"""Tests limits that routers share in a real server, Redis or Valkey: that together they are held, whoever asks, and
what happens while the server is away, hangs, has forgotten all, or answers nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.core.clock import MonotonicClock
from services.core.errors import ConfigError, QuotaExceeded
from services.router.tenants.limit_store import LimitStore
from services.router.tenants.tenant import Quota, Tenant, TenantLimits
from tests.support.pumps import until_either_ends
from tests.support.redis_server import SERVER, WITHOUT, RedisServer

pytestmark = [pytest.mark.skipif(SERVER is None, reason=WITHOUT), pytest.mark.process]

CLOCK = MonotonicClock()
PER_S = 1000.0
BURST = 400
TOKENS = {"tokens_per_min": int(PER_S * 60), "burst_tokens": BURST}
PATIENCE_S = 20.0


class Router:
    """Has a tenant's quota, which it shares by a store."""

    def __init__(self, url: str, name: str, **limits: Any) -> None:
        self.quota = Quota(Tenant("acme", limits=TenantLimits(**limits)), CLOCK.now(), 2)
        self.was_up: list[bool] = []
        self.num_used = 0
        self._store = LimitStore(url, name, CLOCK, self.was_up.append)
        self.task = asyncio.create_task(self._store.run(lambda: [self.quota]))

    @property
    def is_up(self) -> bool:
        return self.was_up[-1:] == [True]

    def ask(self, num_tokens: int = 10) -> bool:
        """Has a request of so many tokens come and go. Returns whether it was let in."""
        try:
            self.quota.enter(CLOCK.now())
        except QuotaExceeded:
            return False
        try:
            self.quota.reserve(num_tokens, CLOCK.now())
        except QuotaExceeded:
            return False
        else:
            self.num_used += num_tokens
            return True
        finally:
            self.quota.leave(0, 0, CLOCK.now())

    def ask_for_all(self) -> None:
        """Asks until it is refused, which is soon."""
        assert not all(self.ask() for _ in range(BURST)), "nothing is limited"

    def enter(self, num_requests: int = 1) -> bool:
        try:
            self.quota.enter(CLOCK.now(), num_requests)
        except QuotaExceeded:
            return False
        return True


@pytest.fixture
def server(tmp_path: Path) -> Any:
    server = RedisServer(tmp_path)
    yield server
    with contextlib.suppress(ProcessLookupError):
        server.process.send_signal(signal.SIGCONT)
    server.kill()


@contextlib.asynccontextmanager
async def routers(url: str, **limits: Any) -> AsyncIterator[tuple[Router, Router]]:
    both = Router(url, "one", **limits), Router(url, "two", **limits)
    try:
        for router in both:
            router.ask(1)
        yield both
    finally:
        for router in both:
            router.task.cancel()
        await asyncio.gather(*(router.task for router in both), return_exceptions=True)


@contextlib.asynccontextmanager
async def late_answers(server: RedisServer, draw: random.Random) -> AsyncIterator[str]:
    """Yields the URL at which the server's answers come up to 80 ms late."""
    serving: set[asyncio.Task[None]] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most_s: float) -> None:
        while data := await reader.read(1 << 16):
            await asyncio.sleep(draw.uniform(0, most_s))
            writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", server.port)
        except ConnectionError:  # it does not answer yet
            writer.close()
            return
        try:
            await until_either_ends(pass_on(reader, to_server, 0), pass_on(from_server, writer, 0.08))
        finally:
            for each in (writer, to_server):
                each.close()
                with contextlib.suppress(ConnectionError):
                    await each.wait_closed()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}/0"
        await asyncio.gather(*serving)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # other tasks and processes tell
            await asyncio.sleep(0.01)


async def used_by(*asking: Router, seconds: float = 3.0, settling_s: float = 1.0) -> float:
    """Returns the tokens a second that routers get which ask for as much as they can, once what was left is used."""
    began_s, until_s, before = time.monotonic(), time.monotonic() + settling_s, 0
    while time.monotonic() < until_s:
        for router in asking:
            router.ask_for_all()
        await asyncio.sleep(0.005)
        if not before and time.monotonic() >= until_s:
            before = sum(router.num_used for router in asking)
            began_s = time.monotonic()
            until_s = began_s + seconds
    return (sum(router.num_used for router in asking) - before) / (time.monotonic() - began_s)


@pytest.mark.parametrize("num_asking", [1, 2])
async def test_the_limit_is_held_together_whoever_asks(server: RedisServer, num_asking: int) -> None:
    """One router that is asked alone gives all of it; two give no more, within 5 %."""
    async with routers(server.url, **TOKENS) as both:
        await until(lambda: all(router.is_up for router in both))
        per_s = await used_by(*both[:num_asking])
    assert per_s <= 1.05 * PER_S
    assert per_s >= 0.8 * PER_S


@pytest.mark.parametrize("most", [1, 5, 8])
async def test_requests_at_once_are_held_together_and_all_places_are_used(server: RedisServer, most: int) -> None:
    async with routers(server.url, concurrent_requests=most) as (one, two):
        await until(lambda: one.is_up and two.is_up)
        await asyncio.sleep(0.2)
        num = 0
        for _ in range(100):
            num += one.enter()
            num += two.enter()
            assert num <= most
            await asyncio.sleep(0.02)
        assert num == most


async def test_requests_at_once_are_held_while_answers_are_on_their_way(server: RedisServer) -> None:
    """A router may use the places that it had until it hears that it has fewer."""
    draw = random.Random(27)
    async with late_answers(server, draw) as url, routers(url, concurrent_requests=6) as both:
        await until(lambda: all(router.is_up for router in both))
        await asyncio.sleep(0.5)
        for _ in range(300):
            router = draw.choice(both)
            for _ in range(draw.randrange(8)):
                router.enter()
            assert sum(each.quota.num_live for each in both) <= 6
            await asyncio.sleep(draw.choice([0, 0, 0.01, 0.1]))
            router = draw.choice(both)
            router.quota.leave(0, 0, CLOCK.now(), draw.randint(0, router.quota.num_live))


async def test_a_call_of_more_prompts_than_a_part_gets_places_where_they_are_free(server: RedisServer) -> None:
    async with routers(server.url, concurrent_requests=6) as (one, two):
        await until(lambda: one.is_up and two.is_up)
        await until(two.enter)
        assert not one.enter(6), "the other has one"
        two.quota.leave(0, 0, CLOCK.now())
        await until(lambda: one.enter(6))
        await asyncio.sleep(0.2)
        assert not two.enter()


async def test_a_killed_router_gives_back_its_places(server: RedisServer) -> None:
    async with routers(server.url, concurrent_requests=4) as (one, two):
        await until(lambda: one.is_up and two.is_up)
        await until(lambda: one.enter() and one.quota.num_live == 3)
        await until(two.enter)
        assert not one.enter()
        assert one.quota.num_live + two.quota.num_live == 4
        await asyncio.sleep(0.2)
        assert not two.enter()
        one.task.cancel()
        await until(two.enter)


async def test_while_the_server_is_away_each_router_has_its_part(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once. A server that comes back without its data grants no burst."""
    async with routers(server.url, **TOKENS) as both:
        await until(lambda: all(router.is_up for router in both))
        caplog.clear()
        server.kill()
        assert 0.8 * PER_S <= await used_by(*both) <= 1.05 * PER_S, "both parts are the limit"
        assert 0.4 * PER_S <= await used_by(both[0]) <= 0.53 * PER_S, "one part is half of it"
        assert not any(router.is_up for router in both)
        errors = [each for each in caplog.records if each.levelno == logging.ERROR]
        assert len(errors) == 2, "one of each router"
        server.start()
        before = sum(router.num_used for router in both)
        began_s = time.monotonic()

        def have_asked_and_are_up() -> bool:
            for router in both:
                router.ask_for_all()
            return all(router.is_up for router in both)

        await until(have_asked_and_are_up)
        per_s = await used_by(*both, settling_s=0.01)
        taken = sum(router.num_used for router in both) - before
        assert per_s <= 1.05 * PER_S
        assert taken <= 1.05 * PER_S * (time.monotonic() - began_s) + BURST / 2


async def test_a_server_that_hangs_holds_nobody(server: RedisServer) -> None:
    async with routers(server.url, **TOKENS) as both:
        await until(lambda: all(router.is_up for router in both))
        server.process.send_signal(signal.SIGSTOP)
        longest_s, last_s = 0.0, time.monotonic()

        async def watch() -> None:
            nonlocal longest_s, last_s
            while True:
                await asyncio.sleep(0.001)
                longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()

        watching = asyncio.create_task(watch())
        per_s = await used_by(*both)
        watching.cancel()
        assert 0.8 * PER_S <= per_s <= 1.05 * PER_S
        assert longest_s < 1.0, "the event loop goes on"
        await until(lambda: not any(router.is_up for router in both))
        server.process.send_signal(signal.SIGCONT)
        await until(lambda: all(router.is_up for router in both))


@pytest.mark.parametrize(
    "answer",
    [
        b"*4\r\n$3\r\n1e9\r\n$3\r\n1e9\r\n:0\r\n:2\r\n",
        b"*4\r\n$3\r\nnan\r\n$3\r\ninf\r\n:0\r\n:2\r\n",
        b"*4\r\n$1\r\n1\r\n$1\r\n1\r\n:1000000\r\n:2\r\n",
        b"*0\r\n",
        b"-ERR no\r\n",
        b"*1000000000\r\n",
        b"$999999999999\r\n",
        b"\x00\xff",
        b"",
    ],
)
async def test_nonsense_grants_nothing(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while data := await reader.read(1 << 16):
                for _ in range(data.count(b"EVAL")):
                    writer.write(answer)
                for _ in range(data.count(b"SETINFO")):
                    writer.write(b"+OK\r\n")
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, routers(f"redis://127.0.0.1:{port}/0", **TOKENS) as both:
        await until(lambda: all(router.was_up == [False] for router in both))
        assert 0.8 * PER_S <= await used_by(*both, seconds=1.5) <= 1.06 * PER_S
        assert not any(router.is_up for router in both)


async def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tenants-store: it is not the URL"):
        LimitStore("http://h", "one", CLOCK)
