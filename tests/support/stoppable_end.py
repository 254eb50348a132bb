"""Runs one end of a connection with Baton's gRPC options, as a process of its own, which can be stopped.

`python -m tests.support.stoppable_end server` prints its port. `... baton PORT` (or `package PORT`: with the options of
the client package) opens one call and prints `True` when it has been answered on it, and once more for each line that
it reads; `False` if the call has ended. Pings are sent as often as gRPC allows; how long an answer is waited for is as
in earnest.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc

from baton_client.wire import OPTIONS
from services.rpc.options import channel_options, server_options

METHOD = "/test.Stoppable/Talk"
PING_EVERY_MS = 1000
"""gRPC sends none sooner after what it last read."""
CHANNELS = {"baton": channel_options, "package": lambda: OPTIONS}
_OFTEN = {"grpc.keepalive_time_ms": PING_EVERY_MS, "grpc.http2.min_ping_interval_without_data_ms": 1}


async def _answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def _serve() -> None:
    server = grpc.aio.server(options=_often(server_options()))
    handlers = {"Talk": grpc.stream_stream_rpc_method_handler(_answer)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Stoppable", handlers)])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


async def _talk(port: str, options: list[tuple[str, Any]]) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call = channel.stream_stream(METHOD)()
        print(await _is_answered(call), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(await _is_answered(call), flush=True)
        call.cancel()


def _often(options: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """GRPC takes the first value of an option."""
    return [*(dict(options) | _OFTEN).items()]


async def _is_answered(call: Any) -> bool:
    try:
        await call.write(b"there?")
        return bool(await call.read() == b"there?")
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return False


if __name__ == "__main__":
    if sys.argv[1] == "server":
        asyncio.run(_serve())
    else:
        asyncio.run(_talk(sys.argv[2], _often(CHANNELS[sys.argv[1]]())))
