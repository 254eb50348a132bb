"""Tests reads by NIXL whose source is killed, stopped or closed while they are under way, or that are given up.

UCX is given TCP alone, so that a read needs its source and takes a while. What a read may still write decides when its
blocks are free: NIXL takes back a read that is under way without waiting for it, and what arrives later is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TypeAlias

import pytest

from services.core.errors import BatonError, StaleIncarnation, TransferFailed
from services.kv.imports import ImportState
from services.kv.regions import Region
from services.kvtransfer.client import FetchOrder
from services.kvtransfer.transports import nixl, nixl_agent
from services.kvtransfer.transports.nixl import NixlCopier
from tests.support import kv_harness
from tests.support.kv_harness import Destination, running, until
from tests.support.kv_memory import content
from tests.support.nixl_source_process import BIG, Offered, SourceProcess, source_process
from tests.support.patience import HANG_S, Patience

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed"),
    pytest.mark.process,
]

MARK = b"\x99" * BIG.block_bytes


@pytest.fixture
def source() -> Iterator[SourceProcess]:
    with source_process("tcp") as process:
        yield process


@pytest.fixture(autouse=True)
def tcp_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_harness, "UCX", {"NET_DEVICES": "lo", "TLS": "tcp"})


@contextlib.asynccontextmanager
async def reading(source: SourceProcess, silence_s: float = 1.0) -> AsyncIterator[Destination]:
    """Yields a destination that has an agent for the source already."""
    destination = Destination(BIG, silence_s=silence_s)
    async with running(destination):
        await served(source, destination)
        yield destination


Doing: TypeAlias = Callable[[Callable[[], object]], None]


@pytest.fixture
def during_the_read(source: SourceProcess, monkeypatch: pytest.MonkeyPatch) -> Doing:
    """Returns what has something done once, on its thread, while a read is under way. The source is stopped before it
    begins, so that it cannot end."""
    acts: list[Callable[[], object]] = []
    describe = nixl_agent.NixlAgent._list

    def before(agent: nixl_agent.NixlAgent, regions: Sequence[Region]) -> object:
        if acts:
            source.send(signal.SIGSTOP)
        return describe(agent, regions)

    def sleep(seconds: float) -> None:
        while acts:
            acts.pop()()
        time.sleep(seconds)

    monkeypatch.setattr(nixl_agent.NixlAgent, "_list", before)
    monkeypatch.setattr(nixl_agent, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    return acts.append


def order(destination: Destination, offered: Offered, leg: int = 1) -> FetchOrder:
    import_ = destination.reserve(offered.num_blocks)
    return FetchOrder(offered.where, offered.lease_id, leg, import_, 0, import_.block_ids)


def expected(offered: Offered) -> list[bytes]:
    return [content(offered.first_seed + index, BIG.block_bytes) for index in range(offered.num_blocks)]


async def served(source: SourceProcess, destination: Destination) -> None:
    offered = await source.lease(1)
    asked = order(destination, offered)
    assert (await destination.fetcher.fetch(asked)).ready
    assert destination.holds(asked.targets) == expected(offered)


def mark(destination: Destination, asked: FetchOrder) -> None:
    """Fills blocks that are free again, as their next owner would."""
    for block_id in asked.targets:
        with destination.memory.block(block_id) as block:
            block[:] = MARK


async def test_a_source_that_is_killed(source: SourceProcess, during_the_read: Doing) -> None:
    async with reading(source) as destination:
        asked = order(destination, await source.lease(24))
        during_the_read(lambda: source.send(signal.SIGKILL))
        with pytest.raises(TransferFailed):
            await destination.fetcher.fetch(asked)
        await until(lambda: asked.import_.state is ImportState.FREED)
        await until(lambda: len(destination.nixl) == 0)


async def test_what_a_stopped_source_gives_later_is_not_written(source: SourceProcess, during_the_read: Doing) -> None:
    async with reading(source) as destination:
        asked, another = order(destination, await source.lease(24)), await source.lease(1)
        during_the_read(lambda: None)
        with pytest.raises(TransferFailed):
            await destination.fetcher.fetch(asked)
        await until(lambda: asked.import_.state is ImportState.FREED)
        mark(destination, asked)
        source.send(signal.SIGCONT)
        with contextlib.suppress(BatonError):  # UCX has ended sources that went on after their destination had left
            await destination.fetcher.fetch(order(destination, another))
        assert all(block == MARK for block in destination.holds(asked.targets))


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_cancelled_fetch_keeps_its_blocks_until_the_read_has_ended(
    source: SourceProcess, during_the_read: Doing, goes_on: bool
) -> None:
    async with reading(source) as destination:
        loop, states = asyncio.get_running_loop(), []
        asked, another = order(destination, await source.lease(24)), await source.lease(1)
        fetch = destination.start(asked)

        def give_up() -> None:
            loop.call_soon_threadsafe(fetch.cancel)
            patience = Patience(HANG_S)
            while asked.import_.state is ImportState.COPYING and not patience.is_over():
                time.sleep(0.001)
            states.append(asked.import_.state)
            if goes_on:
                source.send(signal.SIGCONT)

        during_the_read(give_up)
        with pytest.raises(asyncio.CancelledError):
            await fetch
        await until(lambda: asked.import_.state is ImportState.FREED)
        assert states == [ImportState.DRAINING]
        assert destination.freed == [asked.import_]
        mark(destination, asked)
        source.send(signal.SIGCONT)
        with contextlib.nullcontext() if goes_on else contextlib.suppress(BatonError):
            assert (await destination.fetcher.fetch(order(destination, another))).ready
        assert all(block == MARK for block in destination.holds(asked.targets))


async def test_a_read_that_was_given_up_does_not_end_other_fetches(
    source: SourceProcess, during_the_read: Doing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has as long as they have for the source to go on."""
    monkeypatch.setattr(nixl, "_STOPPED_S", 0.05)
    async with reading(source, silence_s=30.0) as destination:
        loop, asked = asyncio.get_running_loop(), order(destination, await source.lease(24))
        (peer,) = destination.nixl._peers.values()
        other = NixlCopier(destination.nixl, peer)
        other.pin()  # as a fetch does whose next blocks are being computed
        fetch = destination.start(asked)
        during_the_read(lambda: loop.call_soon_threadsafe(fetch.cancel))
        with pytest.raises(asyncio.CancelledError):
            await fetch
        await asyncio.sleep(0.5)  # ten times as long as it would have alone
        assert asked.import_.state is ImportState.DRAINING
        source.send(signal.SIGCONT)
        await until(lambda: asked.import_.state is ImportState.FREED)
        assert not peer.agent.closed
        other.unpin()
        await served(source, destination)
        assert list(destination.nixl._peers.values()) == [peer]


async def test_a_source_that_closes_its_agent(source: SourceProcess, during_the_read: Doing) -> None:
    async with reading(source) as destination:
        asked = order(destination, await source.lease(24))

        def close() -> None:
            source.send(signal.SIGCONT)
            source.close_agent()

        during_the_read(close)
        with pytest.raises(TransferFailed):
            await destination.fetcher.fetch(asked)
        await until(lambda: asked.import_.state is ImportState.FREED)


@pytest.mark.parametrize("met", [True, False])
async def test_the_offer_of_a_source_that_is_gone(source: SourceProcess, met: bool) -> None:
    """Also if another process has its address by now, and whether or not there is an agent for it."""
    destination = Destination(BIG, silence_s=1.0)
    async with running(destination):
        if met:
            await served(source, destination)
        stale = order(destination, await source.lease(1))
        source.end()
        with source_process("tcp") as successor:
            stale.source.address = (await successor.lease(1)).where.address
            with pytest.raises(StaleIncarnation if met else TransferFailed):
                await destination.fetcher.fetch(stale)
            assert stale.import_.state is ImportState.FREED
