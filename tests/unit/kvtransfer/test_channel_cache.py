"""Channels to sources: shared while they are used, closed when they fail and when nobody uses them any more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.core.errors import TransferFailed
from services.kvtransfer.channel_cache import ChannelCache
from tests.support.patience import HANG_S


class FakeChannel:
    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def close(self) -> None:
        self.closed.set()


class Dialler:
    def __init__(self) -> None:
        self.dialled: list[tuple[str, FakeChannel]] = []

    def __call__(self, address: str) -> Any:
        self.dialled.append((address, FakeChannel()))
        return self.dialled[-1][1]


async def test_users_share_a_channel_and_it_is_kept_for_the_next() -> None:
    dial = Dialler()
    cache = ChannelCache(dial)
    with cache.use("a") as one, cache.use("a") as two:
        assert one is two
    with cache.use("a") as three, cache.use("b"):
        assert three is one
    assert [address for address, _ in dial.dialled] == ["a", "b"]
    await cache.close()
    assert all(channel.closed.is_set() for _, channel in dial.dialled)
    assert len(cache) == 0


async def test_the_channel_of_a_source_that_went_away_is_closed() -> None:
    """The last fetch from a source that left in order went well, and there is no next one to fail."""
    dial = Dialler()
    cache = ChannelCache(dial, idle_s=0.02)
    for number in range(20):
        with cache.use(f"host:{number}"):
            pass
    async with asyncio.timeout(HANG_S):
        for _, channel in dial.dialled:
            await channel.closed.wait()
    assert len(cache) == 0
    with cache.use("host:1"):
        assert len(cache) == 1, "it may come back"
    await cache.close()


async def test_a_channel_in_use_is_not_closed() -> None:
    dial = Dialler()
    cache = ChannelCache(dial, idle_s=0.0)
    with cache.use("a"):
        pass
    with cache.use("a"), cache.use("b"):
        with cache.use("c"):
            pass
        async with asyncio.timeout(HANG_S):
            await dial.dialled[2][1].closed.wait()  # a later timer than that of "a"
        assert not dial.dialled[0][1].closed.is_set()
        assert len(cache) == 2
    await cache.close()


async def test_no_newcomer_gets_a_channel_that_failed_somebody() -> None:
    """Its connection may be lost, and as long as others came to it, it would never be closed."""
    dial = Dialler()
    cache = ChannelCache(dial)

    def fail() -> None:
        with cache.use("a"):
            raise TransferFailed("gone")

    with cache.use("a") as first:
        with pytest.raises(TransferFailed):
            fail()
        with cache.use("a") as second:
            assert second is not first
        assert not dial.dialled[0][1].closed.is_set(), "another still uses it"
    await asyncio.wait_for(dial.dialled[0][1].closed.wait(), HANG_S)
    assert len(cache) == 1
    with cache.use("a") as third:
        assert third is second
    await cache.close()
    assert [channel.closed.is_set() for _, channel in dial.dialled] == [True, True]
