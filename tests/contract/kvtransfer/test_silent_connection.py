"""Tests that a connection that loses everything is noticed by questions without an answer, not by a reset that never
comes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from services.core.errors import TransferFailed
from services.kvtransfer.servicer import ALIVE_EVERY_S
from services.rpc.options import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS, channel_options, server_options
from tests.support.kv_harness import Destination, Source, running
from tests.support.proxy import Fault, Proxy

pytestmark = pytest.mark.clock

METHOD = "/test.Silent/Talk"
SCALE = 10
"""So much faster than in earnest."""


async def _talk(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def test_noticed_within_time_and_timeout() -> None:
    handler = grpc.method_handlers_generic_handler(
        "test.Silent", {"Talk": grpc.stream_stream_rpc_method_handler(_talk)}
    )
    server = grpc.aio.server(options=[*server_options(), ("grpc.http2.min_ping_interval_without_data_ms", 1)])
    server.add_generic_rpc_handlers([handler])
    proxy = Proxy(lambda: [os.getpid()])
    await proxy.open()
    proxy.aim(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    faster = [(name, value // SCALE if "time" in name else value) for name, value in channel_options()]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}", options=faster) as channel:
        call = channel.stream_stream(METHOD)()
        await call.write(b"there?")
        assert await call.read() == b"there?"
        with proxy.failing(Fault.DROP, lambda: [os.getpid()]):
            async with asyncio.timeout(4 * (KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS) / SCALE / 1000):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(None)
    await proxy.close()


async def test_a_fetch_that_waits_for_its_prompt_notices_sooner() -> None:
    """The source says that it is there, in the fetch itself: whatever else its connection is used for, and whichever
    connection new calls take. Keepalive waits for longer than a whole host may be paused."""
    source, destination = Source(), Destination(silence_s=2 * ALIVE_EVERY_S)
    async with running(source, destination):
        proxy = Proxy(lambda: [os.getpid()])
        await proxy.open()
        proxy.aim(source.server.port)
        lease = source.lease(40)
        order = destination.order(source, lease)
        order.source.address = f"127.0.0.1:{proxy.port}"
        fetching = destination.start(order)
        await asyncio.sleep(5 * ALIVE_EVERY_S)  # what is tested: a source that says so may take its time
        assert not fetching.done()
        assert source.table.num_fetches == 1
        with proxy.failing(Fault.DROP, lambda: [os.getpid()]):
            async with asyncio.timeout(4 * ALIVE_EVERY_S):
                with pytest.raises(TransferFailed, match="silent"):
                    await fetching
        source.table.abort(lease.lease_id, source.clock.now())
        await proxy.close()


async def test_changes_that_announce_nothing_do_not_keep_a_source_silent() -> None:
    """A source beside many decodes is not silent: steps of a few tokens are published often although they complete no
    block."""
    source, destination = Source(), Destination(silence_s=2 * ALIVE_EVERY_S)
    async with running(source, destination):
        lease = source.lease(40)
        fetching = destination.start(destination.order(source, lease))
        async with asyncio.timeout(60):
            while not source.table.num_fetches:  # noqa: ASYNC110  # no event tells
                await asyncio.sleep(0.01)
        for _ in range(20):
            source.publish(lease, 1)
            await asyncio.sleep(ALIVE_EVERY_S / 4)
        assert not fetching.done()
        source.publish(lease, 40)
        source.seal(lease)
        await fetching
