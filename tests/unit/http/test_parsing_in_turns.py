"""Tests that what is expensive to parse is parsed in turns with all else on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.router.front.http.server import BoundedConnection, ConnectionLimits, HttpServer

pytestmark = pytest.mark.clock

HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
NUM_CHUNKS = 40_000
LONGEST_TURN_S = 0.1
"""A turn takes some milliseconds; without turns, four connections stop the loop for about a second each."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the number of bytes and a checksum of the body."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    answer = b"%d %d" % (len(body), sum(body))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(answer))]})
    await send({"type": "http.response.body", "body": answer})


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    server = HttpServer(app, "127.0.0.1", 0)
    await server.start()
    yield server
    await server.stop()


async def asked(server: HttpServer, *parts: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return await reader.readexactly(length)
    finally:
        writer.close()


async def longest_turn_s() -> float:
    """Runs until it is cancelled, and then returns how much of a processor a turn of the event loop took at most: by
    the clock, a turn is as long as others on the machine make it."""
    longest_s = 0.0
    try:
        while True:
            before_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - before_s)
    except asyncio.CancelledError:
        return longest_s


async def test_a_body_of_tiny_chunks_holds_up_nobody(server: HttpServer) -> None:
    watching = asyncio.create_task(longest_turn_s())
    body = b"40\r\n%s\r\n" % (b"x" * 64) * NUM_CHUNKS + END
    answers = await asyncio.gather(*(asked(server, CHUNKED, body) for _ in range(4)))
    watching.cancel()
    assert answers == [b"%d %d" % (64 * NUM_CHUNKS, 64 * NUM_CHUNKS * ord("x"))] * 4
    assert await watching < LONGEST_TURN_S


@pytest.mark.parametrize("size", [1, 7, 1023, 1024, 1025, 5000])
async def test_a_body_of_many_lines_arrives_whole_however_it_is_cut(server: HttpServer, size: int) -> None:
    body = b"a line\n" * 3000
    head = HEAD + b"content-length: %d\r\n\r\n" % len(body)
    whole = head + body
    cuts = range(0, len(whole), size) if size > 1000 else [0, size, 600, 4321]
    parts = [whole[start:end] for start, end in zip(cuts, [*cuts[1:], len(whole)], strict=True)]
    assert await asked(server, *parts) == b"%d %d" % (len(body), sum(body))


async def test_many_requests_in_one_message_are_all_answered(server: HttpServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write((HEAD + b"content-length: 2\r\n\r\nhi") * 200)
    writer.write(HEAD + b"content-length: 2\r\nconnection: close\r\n\r\nhi")
    assert (await reader.read()).count(b"\r\n\r\n2 209") == 201
    writer.close()


async def test_a_request_behind_another_is_parsed_in_turns_too(server: HttpServer) -> None:
    """Its lines have arrived with those of the first, so they must not be handed to the parser at once."""
    first = HEAD + b"content-length: 2\r\n\r\nhi"
    many = CHUNKED + b"1\r\nx\r\n" * 4000 + END
    turns_s = []
    for _ in range(3):
        watching = asyncio.create_task(longest_turn_s())
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write((first + many) * 20 + HEAD + b"connection: close\r\ncontent-length: 0\r\n\r\n")
        answers = await reader.read()
        writer.close()
        watching.cancel()
        turns_s.append(await watching)
        assert answers.count(b"\r\n\r\n2 209HTTP") == 20
        assert answers.count(b"\r\n\r\n4000 %d" % (4000 * ord("x"))) == 20
    # 4000 chunks at once take 40 ms; the best of three, since whatever else runs on the machine makes turns long.
    assert min(turns_s) < LONGEST_TURN_S / 4


async def test_what_is_read_is_bounded_after_an_early_answer() -> None:
    """When the rest of an answered request has come, nothing more is read before what is there is parsed."""
    release = asyncio.Event()

    async def early_then_never(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/late":
            await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    server = HttpServer(early_then_never, "127.0.0.1", 0)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(CHUNKED + b"1\r\nx\r\n" * 100)
    await reader.readuntil(b"\r\n\r\n")
    rest = b"1\r\nx\r\n" * 1000 + END
    late = b"POST /late HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\nx: "
    late += b"y" * (-(len(rest) + len(late) + 4) % 1024) + b"\r\n\r\n"
    writer.write(rest + late + b"a:\r\n" * 10_000_000)
    await asyncio.sleep(0.5)  # what is tested: that nothing more is taken, however long it lasts
    (connection,) = server.connections.each()
    assert isinstance(connection, BoundedConnection)
    assert len(connection._unparsed) < 1 << 20, "not the 40 MB that were sent"
    writer.transport.abort()
    release.set()
    await server.stop()


async def test_what_follows_a_last_request_does_not_spoil_its_answer(server: HttpServer) -> None:
    head = HEAD + b"connection: close\r\ncontent-length: %d\r\nx: "
    body = b"a line\n" * 300
    for beyond in range(-4, 5):
        start = head % len(body)
        start += b"y" * ((beyond - len(start) - 4 - len(body)) % 1024) + b"\r\n\r\n"
        assert await asked(server, start + body + b"\r\n") == b"%d %d" % (len(body), sum(body))


async def test_who_waits_for_its_turn_is_not_called_slow() -> None:
    server = HttpServer(app, "127.0.0.1", 0, ConnectionLimits(500, 500, body_grace_s=1.0))
    await server.start()
    body = b"40\r\n%s\r\n" % (b"x" * 64) * 4000 + END
    answers = await asyncio.gather(*(asked(server, CHUNKED, body) for _ in range(120)))
    assert answers == [b"%d %d" % (64 * 4000, 64 * 4000 * ord("x"))] * 120
    await server.stop()


async def test_half_a_head_behind_another_request_is_not_waited_for() -> None:
    """It has arrived before the first answer, and nothing more comes that would start a clock."""
    server = HttpServer(app, "127.0.0.1", 0, ConnectionLimits(max_connections=9, max_per_peer=9, head_s=0.2))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = HEAD + b"content-length: 967\r\n\r\n"
    first = head + b"a line\n" * 138 + b"\n"
    assert len(first) == 1024, "a slice, so that nothing of the second has reached the parser"
    writer.write(first + b"GET / HTTP/1.1\r\nx: " + b"y" * 5000)
    async with asyncio.timeout(20):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" in await reader.read()
    writer.close()
    await server.stop()


async def test_what_is_refused_says_why(server: HttpServer) -> None:
    for data, status in (
        (HEAD + b"a:\r\n" * 15_000 + b"\r\n", b"431"),
        (HEAD + b"a: " + b"a" * 100_000, b"431"),
        (CHUNKED + b"0\r\n" + b"a:\r\n" * 12_000 + b"\r\n", b"431"),
        (CHUNKED + b"1\r\nx\r\n" * 5000 + END, b"400"),
        (b"\r\n" * 50_000, b"400"),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data)
        assert (await reader.readline()).startswith(b"HTTP/1.1 " + status)
        writer.close()


async def test_who_leaves_while_it_is_parsed_leaves_nothing(server: HttpServer) -> None:
    for _ in range(3):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(CHUNKED + b"1\r\nx\r\n" * NUM_CHUNKS)
        await asyncio.sleep(0)
        writer.transport.abort()
    async with asyncio.timeout(20):
        while len(server.connections) or server.connections._parsing:  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.01)
    assert await asked(server, HEAD + b"content-length: 2\r\n\r\nhi") == b"2 209"


async def test_a_connection_that_cannot_be_parsed_ends_alone(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parse = BoundedConnection._parse

    def raises_for_one(connection: BoundedConnection, data: bytes) -> None:
        if b"poison" in data:
            raise ValueError("poisoned")
        parse(connection, data)

    monkeypatch.setattr(BoundedConnection, "_parse", raises_for_one)
    body = b"a line\n" * 300
    head = HEAD + b"content-length: %d\r\n\r\n" % len(body)
    answers = await asyncio.gather(
        asked(server, head + body),
        asked(server, b"poison" + head + body),
        asked(server, head + body),
        return_exceptions=True,
    )
    good = b"%d %d" % (len(body), sum(body))
    assert answers[0] == answers[2] == good
    assert isinstance(answers[1], (ConnectionError, asyncio.IncompleteReadError))
    assert await asked(server, head + body) == good
    assert "poisoned" in caplog.text
