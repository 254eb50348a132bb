"""uvicorn in the router's loop: ports it cannot have, signals it leaves alone, clients it does not wait for."""

from __future__ import annotations

import asyncio
import signal
import socket

import pytest
from starlette.types import Receive, Scope, Send

from services.core.errors import ConfigError
from services.router.http.server import HttpServer

REQUEST = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})


async def short(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_a_port_that_is_taken_names_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--http-port: cannot listen on 127.0.0.1:{port}: "):
            await HttpServer(short, "127.0.0.1", port).start()
    with pytest.raises(ConfigError, match=r"--http-port: cannot listen on 192\.0\.2\.1:0: "):
        await HttpServer(short, "192.0.2.1", 0).start()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_it_leaves_signals_alone_and_nothing_behind(host: str) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    before = asyncio.all_tasks()
    server = HttpServer(short, host, 0)
    await server.start()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    reader, writer = await asyncio.open_connection(host, server.port)
    writer.write(REQUEST)
    assert (await reader.readline()).startswith(b"HTTP/1.1 204")
    await server.stop()
    assert server.serving.done()
    await reader.read()  # the connection was closed
    writer.close()
    assert asyncio.all_tasks() == before


async def test_a_client_that_never_reads_does_not_delay_the_end() -> None:
    server = HttpServer(endless, "127.0.0.1", 0)
    await server.start()
    with socket.socket() as mute:
        mute.setblocking(False)
        await asyncio.get_running_loop().sock_connect(mute, ("127.0.0.1", server.port))
        await asyncio.get_running_loop().sock_sendall(mute, REQUEST)
        await asyncio.get_running_loop().sock_recv(mute, 1)  # it is being answered
        async with asyncio.timeout(30.0):
            await server.stop()


async def test_headers_are_bounded() -> None:
    server = HttpServer(short, "127.0.0.1", 0)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000)
    assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    writer.close()
    await server.stop()
