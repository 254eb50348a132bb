"""Tests HTTP inside TLS, on both event loops: what is answered, what half-done handshakes cost, new certificates."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography import x509
from starlette.types import Receive, Scope, Send

from services.cli.certs import make_certificates
from services.router.front.http.connection import ConnectionLimits
from services.router.front.http.server import HttpServer
from services.rpc.certificates import PUBLIC_FLAGS, Certificates
from tests.support.certificates import certificates, written

REQUEST = b"GET /asked HTTP/1.1\r\nhost: here\r\n\r\n"
LIMITS = ConnectionLimits(max_connections=4, max_per_peer=4, reserve=2, head_s=1.0)

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "tls")


async def scheme(scope: Scope, receive: Receive, send: Send) -> None:
    body = scope["scheme"].encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(held: Certificates) -> AsyncIterator[int]:
    before = asyncio.all_tasks()
    server = HttpServer(scheme, "127.0.0.1", 0, LIMITS, held)
    await server.start()
    try:
        yield server.port
    finally:
        await server.stop()
        async with asyncio.timeout(10):
            while len(server.connections) or asyncio.all_tasks() - before:  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # for transports that are being closed


def trusting(folder: Path, role: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.set_alpn_protocols(["h2", "http/1.1"])
    if role:
        context.load_cert_chain(folder / f"{role}.pem", folder / f"{role}.key")
    return context


async def get(port: int, context: ssl.SSLContext, times: int = 1) -> tuple[str, int]:
    """Returns the body of the last answer, and the serial number of the server's certificate."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        tls = writer.get_extra_info("ssl_object")
        assert tls.selected_alpn_protocol() == "http/1.1"
        for _ in range(times):
            writer.write(REQUEST)
            async with asyncio.timeout(10):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                body = await reader.readexactly(5)
        return body.decode(), x509.load_der_x509_certificate(tls.getpeercert(binary_form=True)).serial_number
    finally:
        writer.transport.abort()


async def ended(talk: Awaitable[Any]) -> bool:
    """Returns whether the server ends a connection on which it is told nonsense, or nothing."""
    try:
        async with asyncio.timeout(10):
            await talk
    except (OSError, asyncio.IncompleteReadError):
        return True
    return False


def test_requests_are_answered_inside_tls(run: Run, folder: Path) -> None:
    async def scenario() -> None:
        held = certificates(folder, "router")
        async with serving(Certificates(str(folder / "router.pem"), str(folder / "router.key"))) as port:
            for _ in range(20):  # a request that comes with the end of the handshake is not lost
                assert await get(port, trusting(folder), times=3) == ("https", held.serial)

    run(scenario())


def test_a_ca_for_clients_asks_for_their_certificates(run: Run, folder: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        files = (folder / name for name in ("router.pem", "router.key", "ca.pem"))
        async with serving(Certificates(*map(str, files), flags=PUBLIC_FLAGS)) as port:
            assert (await get(port, trusting(folder, "client")))[0] == "https"
            assert await ended(get(port, trusting(folder)))
            other = trusting(written(tmp_path / "other"), "client")
            other.load_verify_locations(folder / "ca.pem")
            assert await ended(get(port, other))

    run(scenario())


def test_a_new_certificate_is_shown_to_newcomers_and_open_connections_go_on(run: Run, folder: Path) -> None:
    async def scenario() -> None:
        held = Certificates(str(folder / "router.pem"), str(folder / "router.key"), look_every_s=0.0)
        before = trusting(folder)
        async with serving(held) as port:
            old = held.serial
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=before)
            await asyncio.to_thread(written, folder, make_certificates())
            assert (await get(port, trusting(folder)))[1] == held.serial != old
            writer.write(REQUEST)
            assert (await reader.readuntil(b"https")).startswith(b"HTTP/1.1 200")
            writer.transport.abort()

    run(scenario())


def test_a_request_in_the_clear_is_refused_without_harm(run: Run, folder: Path) -> None:
    async def scenario() -> None:
        async with serving(certificates(folder, "router")) as port:
            for data in (REQUEST, b"\x00" * 4096, b"\x16\x03\x01\xff\xff" + b"x" * 70_000):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(data)
                async with asyncio.timeout(10):
                    with contextlib.suppress(ConnectionError):
                        assert b"HTTP" not in await reader.read()
                writer.transport.abort()
            assert (await get(port, trusting(folder, "client")))[0] == "https"

    run(scenario())


def test_handshakes_that_are_never_ended_keep_nobody_out_and_end(run: Run, folder: Path) -> None:
    async def scenario() -> None:
        async with serving(certificates(folder, "router")) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
            for _, writer in silent[::2]:
                writer.write(b"\x16\x03\x01\x02\x00\x01")
            assert (await get(port, trusting(folder, "client")))[0] == "https"
            async with asyncio.timeout(20):
                for reader, writer in silent:
                    with contextlib.suppress(ConnectionError):
                        assert await reader.read() == b""
                    writer.transport.abort()

    run(scenario())


def test_the_end_of_the_server_ends_handshakes(run: Run, folder: Path) -> None:
    async def scenario() -> None:
        async with serving(certificates(folder, "router")) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            await asyncio.sleep(0.1)
        for reader, writer in silent:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.transport.abort()

    run(scenario())
