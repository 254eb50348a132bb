"""Tests uvicorn in the router's loop: ports it cannot have, signals it leaves alone, clients it does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from starlette.types import Receive, Scope, Send

from services.core.errors import ConfigError
from services.router.front.http import connection
from services.router.front.http.connection import ConnectionLimits
from services.router.front.http.server import HttpServer

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


# -- limits of connections


class Gate:
    """Is an application with an endpoint that holds its answers back, and one about health that does not."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.num_waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/health/live":
            while (await receive()).get("more_body", False):
                pass
            self.num_waiting += 1
            await self.opened.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@contextlib.asynccontextmanager
async def serving(
    app: Callable[[Scope, Receive, Send], object], monkeypatch: pytest.MonkeyPatch, **changes: float
) -> AsyncIterator[HttpServer]:
    monkeypatch.setattr(connection, "SWEEP_S", 0.02)
    wanted: dict[str, float] = {"max_connections": 4, "max_per_peer": 4, "reserve": 2, **changes}
    server = HttpServer(app, "127.0.0.1", 0, ConnectionLimits(**wanted))  # type: ignore[arg-type]
    await server.start()
    try:
        yield server
    finally:
        for writer in _opened:
            writer.close()
        _opened.clear()
        await server.stop()
        assert not len(server.connections)


_opened: list[asyncio.StreamWriter] = []


async def connect(server: HttpServer, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await open_from("127.0.0.1", server.port, data)


async def status(reader: asyncio.StreamReader) -> int:
    """Returns the status of the next answer; 0 if the connection was closed instead."""
    async with asyncio.timeout(10):
        line = await reader.readline()
        if not line:
            return 0
        while await reader.readline() not in (b"\r\n", b""):
            pass
    return int(line.split()[1])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.005)


GET = b"GET /%b HTTP/1.1\r\nhost: localhost\r\n\r\n"
HEALTH = GET % b"health/live"


async def test_one_address_cannot_have_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    async with serving(gate, monkeypatch, max_connections=100, max_per_peer=2) as server:
        for _ in range(2):
            await connect(server, GET % b"busy")
        await until(lambda: gate.num_waiting == 2)
        extra, _ = await connect(server, GET % b"busy")
        assert await status(extra) == 503
        other, _ = await open_from("127.0.0.9", server.port, GET % b"busy")
        await until(lambda: gate.num_waiting == 3)
        gate.opened.set()
        assert await status(other) == 204


async def open_from(host: str, port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
    _opened.append(writer)
    writer.write(data)
    return reader, writer


POST = b"POST /busy HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "more", "answer"),
    [
        (b"", b"", 0),
        (b"GET / HTTP/1.1\r\n", b"x", 408),
        (POST, b" ", 408),
        (POST, b"", 408),
        (HEALTH + b"GET / HTTP/1.1\r\n", b"x", 408),
    ],
    ids=["nothing", "headers in drips", "a body in drips", "no body", "the second request's headers in drips"],
)
async def test_a_request_that_does_not_arrive(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, more: bytes, answer: int
) -> None:
    async with serving(Gate(), monkeypatch, head_s=0.2, body_grace_s=0.2) as server:
        reader, writer = await connect(server, sent)
        if sent.startswith(HEALTH):
            assert await status(reader) == 204

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while more:
                    writer.write(more)
                    await writer.drain()
                    await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        assert await status(reader) == answer
        dripping.cancel()
        writer.close()
        await until(lambda: not len(server.connections))


async def test_a_slow_upload_that_moves_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    gate.opened.set()
    async with serving(gate, monkeypatch, body_grace_s=0.1, body_bytes_per_s=10) as server:
        reader, writer = await connect(server, POST)
        for _ in range(20):
            writer.write(b"     ")
            await asyncio.sleep(0.02)
        assert await status(reader) == 204


async def test_a_client_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffer has taken only a little of what is sent to it by then."""
    ended = asyncio.Event()

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    async def streaming(scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(endless(scope, receive, send))
        with contextlib.suppress(asyncio.CancelledError):
            await counted(scope, receive, _dropped)
        work.cancel()

    async def _dropped(message: object) -> None:
        pass

    async with serving(streaming, monkeypatch, write_s=0.3) as server:
        _, writer = await connect(server, REQUEST)
        await asyncio.wait_for(ended.wait(), 10)
        await until(lambda: not len(server.connections))
        writer.close()
