"""Tests an HTTP connection over a socket: what a client may send, and when; how it may leave; what it may cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import pytest
import uvloop
from starlette.types import Message, Receive, Scope, Send

from services.router.front.http.app import guarded
from services.router.front.http.connection import MAX_LINES, MOST_EARLY_BYTES, ConnectionLimits, ConnectionStage
from services.router.front.http.reply import DIRECT, ROOM, Reply
from services.router.front.http.server import HttpServer
from tests.support.patience import HANG_S

PAGE = "https://app.example"
LIMITS = ConnectionLimits(max_connections=4, max_per_peer=4, reserve=2)
HOST = b"host: localhost\r\n"
GET = b"GET /%b HTTP/1.1\r\n" + HOST + b"\r\n"
LAST = b"GET /%b HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n"
PARTS = [b"%d," % number * 4096 for number in range(1000)]
CHUNKED = b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"


def post(body: bytes, path: bytes = b"", more: bytes = b"") -> bytes:
    return b"POST /%b HTTP/1.1\r\n%bcontent-length: %d\r\n%b\r\n%b" % (path, HOST, len(body), more, body)


class App:
    """Answers with what it was asked. Below /held it waits for `release` first, /stream sends a part before that,
    /early answers before the body has come, /parts sends PARTS, each as soon as the client has room, and /pours sends
    them without looking."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.left: asyncio.Queue[str] = asyncio.Queue()
        """Paths of requests whose clients have left before the answer."""
        self.num_poured = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, body = scope["path"], b""
        headers = [(b"content-type", b"application/json")]
        if path == "/early":
            await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0"), *headers]})
            await send({"type": "http.response.body", "body": b""})
            return
        if path == "/parts":
            try:
                await self._parts(Reply(send, scope["state"][ROOM], scope["state"][DIRECT]))
            finally:
                self.begun.put_nowait("over")
            return
        if path == "/pours":
            self.begun.put_nowait(path)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for self.num_poured, part in enumerate(PARTS, 1):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.put_nowait(path)
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.begun.put_nowait(path)
        if path.startswith("/stream"):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"first,", "more_body": True})
        if path.startswith(("/held", "/stream")) and not await self._released(path, receive):
            return
        answer = b"last" if path.startswith("/stream") else self._told(scope, body)
        if not path.startswith("/stream"):
            headers.append((b"content-length", b"%d" % len(answer)))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _parts(self, reply: Reply) -> None:
        for part in PARTS:
            if not reply.room.is_there:
                self.begun.put_nowait("no room")
                is_there = asyncio.Event()
                reply.room.awaited.append(is_there.set)
                await is_there.wait()
                reply.room.awaited.clear()
            reply.part(part)
        await reply.done()

    async def _released(self, path: str, receive: Receive) -> bool:
        gone, release = asyncio.ensure_future(receive()), asyncio.ensure_future(self.release.wait())
        await asyncio.wait({gone, release}, return_when=asyncio.FIRST_COMPLETED)
        has_left: Message | None = gone.result() if gone.done() else None
        gone.cancel()
        release.cancel()
        if has_left is not None:
            self.left.put_nowait(path)
        return has_left is None

    def _told(self, scope: Scope, body: bytes) -> bytes:
        query, host = scope["query_string"].decode(), dict(scope["headers"]).get(b"host", b"").decode()
        told = {"method": scope["method"], "path": scope["path"], "query": query, "host": host}
        return json.dumps({**told, "bytes": len(body), "sum": sum(body)}).encode()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self, *, is_to_head: bool = False) -> tuple[int, dict[str, str], bytes]:
        """Returns the next answer, which says how long it is: its status, headers and body."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
        length = 0 if is_to_head else int(headers.get("content-length", 0))
        return int(head[0].split()[1]), headers, await self.reader.readexactly(length)

    async def refusal(self) -> tuple[int, str, dict[str, str]]:
        """Returns (status, code, headers) of an answer that is an error, after which the connection is closed."""
        status, headers, body = await self.answer()
        assert headers["connection"] == "close"
        assert headers["content-type"] == "application/json"
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert await self.reader.read() == b""
        return status, error["code"], headers


class Stage:
    """Is a server with its app and its clients."""

    def __init__(self, app: App, server: HttpServer) -> None:
        self.app, self.server = app, server
        self._clients: list[Client] = []

    async def client(self, sent: bytes = b"", host: str = "127.0.0.1") -> Client:
        streams = await asyncio.open_connection("127.0.0.1", self.server.port, local_addr=(host, 0))
        self._clients.append(Client(*streams))
        streams[1].write(sent)
        return self._clients[-1]

    async def asked(self, sent: bytes) -> Any:
        """Returns what the app says of a request."""
        status, _, body = await (await self.client(sent)).answer()
        assert status == 200, body
        return json.loads(body)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_S):
            while not condition():  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0)

    def later(self, seconds: float) -> None:
        """Checks connections as if so much time had gone by."""
        for connection in self.server.connections.each():
            connection.check(asyncio.get_running_loop().time() + seconds)

    def close(self) -> None:
        for client in self._clients:
            client.writer.transport.abort()


@contextlib.asynccontextmanager
async def staged() -> AsyncIterator[Stage]:
    app = App()
    around = partial(guarded, bound="127.0.0.1", origins=[PAGE])
    server = HttpServer(app, "127.0.0.1", 0, LIMITS, around=around)
    await server.start()
    stage = Stage(app, server)
    async with asyncio.timeout(HANG_S):
        yield stage
        stage.close()
        await stage.until(lambda: not len(server.connections))
        await server.stop()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with staged() as stage:
        yield stage


# -- requests


@pytest.mark.parametrize(
    ("target", "path", "query", "host"),
    [
        (b"http://localhost/a?b=c", "/a", "b=c", "localhost"),
        (b"HTTP://localhost:81/a%20b", "/a b", "", "localhost:81"),
        (b"https://127.0.0.1", "/", "", "127.0.0.1"),
        (b"http://localhost?b", "/", "b", "localhost"),
        (b"http://user:word@[::1]:8000/a#part", "/a", "", "[::1]:8000"),
        (b"/a?b#part", "/a", "b", "localhost"),
        (b"//a/b", "//a/b", "", "localhost"),
    ],
)
async def test_targets(stage: Stage, target: bytes, path: str, query: str, host: str) -> None:
    """A target may be a whole URL, as clients send it behind a proxy setting."""
    told = await stage.asked(b"POST %b HTTP/1.1\r\n%bcontent-length: 2\r\n\r\nhi" % (target, HOST))
    assert (told["path"], told["query"], told["host"]) == (path, query, host)
    assert (told["method"], told["bytes"]) == ("POST", 2)


async def test_the_host_of_an_absolute_target_is_the_one_that_counts(stage: Stage) -> None:
    evil = await stage.client(b"GET http://evil.example/ HTTP/1.1\r\n" + HOST + b"\r\n")
    assert (await evil.answer())[0] == 403
    assert (await stage.asked(b"GET http://localhost/ HTTP/1.1\r\nhost: evil.example\r\n\r\n"))["host"] == "localhost"


async def test_empty_lines_between_requests(stage: Stage) -> None:
    client = await stage.client(b"\r\n\r\n" + post(b"hi") + b"\r\n" + post(b"you") + b"\r\n")
    for num_bytes in (2, 3):
        assert json.loads((await client.answer())[2])["bytes"] == num_bytes
    stage.later(LIMITS.head_s + 1)
    client.writer.write(GET % b"more")
    assert (await client.answer())[0] == 200, "an empty line is no request that is waited for"


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1 << 20])
async def test_pipelined_requests_are_answered_in_order(stage: Stage, cut: int) -> None:
    chunked = CHUNKED + b"1\r\nx\r\n4;a=b\r\n\r\n\r\n\r\n0\r\na: b\r\n\r\n"
    sent = (post(b"hi") + chunked + GET % b"a" + b"\r\n" + chunked) * 3 + LAST % b"z"
    client = await stage.client()
    for start in range(0, len(sent), cut):
        client.writer.write(sent[start : start + cut])
        await asyncio.sleep(0)
    sizes = [json.loads((await client.answer())[2])["bytes"] for _ in range(13)]
    assert sizes == [2, 5, 0, 5] * 3 + [0]
    assert await client.reader.read() == b""


async def test_a_large_body(stage: Stage) -> None:
    client = await stage.client(post(b"x" * 5_000_000) + LAST % b"end")
    assert [json.loads((await client.answer())[2])["bytes"] for _ in range(2)] == [5_000_000, 0]


@pytest.mark.parametrize("early", [post(b"x" * MOST_EARLY_BYTES), GET % b"a" * 5000])
async def test_what_comes_before_its_time_is_bounded(stage: Stage, early: bytes) -> None:
    """What was asked before is answered all the same."""
    client = await stage.client(GET % b"held")
    assert await stage.app.begun.get() == "/held"
    client.writer.write(early)
    await client.writer.drain()
    for _ in range(3):
        await (await stage.client(GET % b"a")).answer()  # so that what was sent before has arrived
    stage.app.release.set()
    assert json.loads((await client.answer())[2])["path"] == "/held"
    while (answer := await client.answer())[0] == 200:
        pass
    assert (answer[0], json.loads(answer[2])["error"]["code"]) == (400, "too_early")


async def test_an_offer_of_another_protocol_is_declined(stage: Stage) -> None:
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    client = await stage.client((post(b"hi", more=offer) + post(b"", more=offer)) * 2)
    assert [json.loads((await client.answer())[2])["bytes"] for _ in range(4)] == [2, 0, 2, 0]


async def test_what_is_wrong_behind_an_offer_is_refused(stage: Stage) -> None:
    offer = b"connection: Upgrade\r\nupgrade: h2c\r\n"
    client = await stage.client(post(b"hi", more=offer) + b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n")
    assert (await client.answer())[0] == 200
    assert (await client.refusal())[0] == 400


async def test_trailers_are_no_headers(stage: Stage) -> None:
    told = await stage.asked(CHUNKED + b"2\r\nhi\r\n0\r\nhost: evil\r\n\r\n")
    assert (told["host"], told["bytes"]) == ("localhost", 2)


async def test_expecting_to_be_told_to_continue(stage: Stage) -> None:
    request = post(b"hi", more=b"expect: 100-continue\r\n")
    client = await stage.client(request[:-2])
    assert (await client.answer())[0] == 100
    client.writer.write(request[-2:])
    assert (await client.answer())[0] == 200
    refused = await stage.client(post(b"hi", b"early", b"expect: 100-continue\r\n")[:-2])
    assert (await refused.answer())[0] == 413, "and the body is not asked for"


async def test_http_1_0(stage: Stage) -> None:
    """Its connections end with the answer, and a body of unknown length is not in chunks."""
    stage.app.release.set()
    plain = await stage.client(b"GET /a HTTP/1.0\r\n\r\n")
    assert json.loads((await plain.answer())[2])["path"] == "/a"
    assert await plain.reader.read() == b""
    head, _, body = (await (await stage.client(b"GET /stream HTTP/1.0\r\n\r\n")).reader.read()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body == b"first,last"


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_parts_wait_for_a_client_that_does_not_read(stage: Stage, version: bytes) -> None:
    client = await stage.client((LAST % b"parts").replace(b"HTTP/1.1", b"HTTP/" + version))
    assert await stage.app.begun.get() == "no room"
    body = (await client.reader.read()).partition(b"\r\n\r\n")[2]
    if version == b"1.1":
        body = b"".join(body.split(b"\r\n")[1::2])  # without the sizes of its chunks
    assert body == b"".join(PARTS) + b"data: [DONE]\n\n"


async def test_an_application_that_does_not_look_is_held_up(stage: Stage) -> None:
    client = await stage.client(LAST % b"pours")
    await stage.app.begun.get()
    assert stage.app.num_poured < len(PARTS)
    body = (await client.reader.read()).partition(b"\r\n\r\n")[2]
    assert b"".join(body.split(b"\r\n")[1::2]) == b"".join(PARTS)


async def test_head(stage: Stage) -> None:
    client = await stage.client((GET % b"a").replace(b"GET", b"HEAD") + GET % b"a")
    _, headers, _ = await client.answer(is_to_head=True)
    assert int(headers["content-length"]) > 0
    assert (await client.answer())[0] == 200


# -- what is refused

LONG = b"GET / HTTP/1.1\r\n" + HOST
TINY = b"1\r\nx\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", 505),
        (b"GET / HTTP/3.0\r\n" + HOST + b"\r\n", 505),
        (b"GET / HTTP/1.2\r\n" + HOST + b"\r\n", 505),
        (b"GET /\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"nonsense", 400),
        (b"GET / HTTP/1.1\n" + HOST + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a: \x01\r\n\r\n", 400),
        (b"GET a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET ftp://localhost/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"CONNECT localhost:1 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (post(b"").replace(b"content-length: 0", b"content-length: x"), 400),
        (post(b"hi", more=b"content-length: 3\r\n"), 400),
        (post(b"hi", more=b"transfer-encoding: chunked\r\n"), 400),
        (CHUNKED + b"x\r\n", 400),
        (LONG + b"x: " + b"y" * 70_000, 431),
        (LONG + (b"a: b\r\n" * (MAX_LINES - 1)) + b"\r\n", 431),
        (b"GET /" + b"a" * 70_000, 431),
        (CHUNKED + b"2\r\nhi\r\n0\r\n" + b"a: b\r\n" * (MAX_LINES + 2), 431),
        (CHUNKED + b"2\r\nhi\r\n0\r\na: " + b"b" * 80_000, 400),
        (CHUNKED + b"2;" + b"b" * 80_000, 400),
        (CHUNKED + TINY * 20_000, 400),
    ],
    ids=lambda value: repr(value[:50]) if isinstance(value, bytes) else None,
)
@pytest.mark.parametrize("before", [b"", post(b"hi")], ids=["first", "second"])
async def test_what_is_no_request_is_refused(stage: Stage, sent: bytes, status: int, before: bytes) -> None:
    client = await stage.client(before + sent)
    if before:
        assert (await client.answer())[0] == 200
    assert (await client.refusal())[0] == status


async def test_what_is_just_within_bounds_is_answered(stage: Stage) -> None:
    lines = b"GET / HTTP/1.1\r\n" + HOST + b"a: b\r\n" * (MAX_LINES - 2) + b"\r\n"
    long = b"GET / HTTP/1.1\r\n" + HOST + b"a: " + b"b" * 60_000 + b"\r\n\r\n"
    trailers = CHUNKED + b"0\r\n" + b"a: b\r\n" * MAX_LINES + b"\r\n"
    fair = CHUNKED + (b"40\r\n" + b"x" * 64 + b"\r\n") * 20_000 + b"0\r\n\r\n"
    tiny = CHUNKED + TINY * 10_000 + b"0\r\n\r\n"
    for sent, num_bytes in ((lines, 0), (long, 0), (trailers, 0), (fair, 1_280_000), (tiny, 10_000)):
        told = await stage.asked(sent)
        assert (told["bytes"], told["sum"]) == (num_bytes, num_bytes * ord("x"))
    text = b"a line\n\n\r\n\r\n" * 9000
    assert (await stage.asked(post(text)))["sum"] == sum(text)


async def test_refusals_are_as_other_answers_are(stage: Stage) -> None:
    """They have the request's id, and what a page of another origin needs to read them."""
    named = b"x-request-id: mine\r\norigin: %b\r\n" % PAGE.encode()
    long = b"GET / HTTP/1.1\r\n" + HOST + named + b"a: b\r\n" * MAX_LINES
    cases = [(long, 431), (b"GET / HTTP/2.0\r\n" + named + b"\r\n", 505), (CHUNKED_BY % named, 400)]
    cases += [(b"GET / HTTP/1.1\r\n" + named + b"bad header\r\n\r\n", 400), (LONG + named + b"y" * 70_000, 431)]
    for sent, status in cases:
        seen, _, headers = await (await stage.client(sent)).refusal()
        assert (seen, headers["x-request-id"], headers["access-control-allow-origin"]) == (status, "mine", PAGE)
    _, _, headers = await (await stage.client(b"nonsense")).refusal()
    assert headers["x-request-id"].startswith("req-")
    earlier = await stage.client(
        b"GET / HTTP/1.1\r\n" + HOST + named + b"\r\n" + b"GET / HTTP/1.1\r\nbad header\r\n\r\n"
    )
    assert (await earlier.answer())[1]["x-request-id"] == "mine"
    assert (await earlier.refusal())[2]["x-request-id"].startswith("req-"), "not that of the request before"
    odd = b"GET / HTTP/1.1\r\nx-request-id: a\x9b\x01b\r\nbad header\r\n\r\n"
    _, _, headers = await (await stage.client(odd)).refusal()
    assert headers["x-request-id"] == "a%9B%01b"


CHUNKED_BY = b"POST / HTTP/1.1\r\n" + HOST + b"%btransfer-encoding: chunked\r\n\r\nx"


# -- how clients leave


@pytest.mark.parametrize("path", [b"held", b"stream"])
async def test_a_client_that_half_closes_after_its_last_request_reads_on(stage: Stage, path: bytes) -> None:
    client = await stage.client(LAST % path)
    client.writer.write_eof()
    await stage.app.begun.get()
    stage.app.release.set()
    assert (await client.reader.read()).endswith(b"}" if path == b"held" else b"4\r\nlast\r\n0\r\n\r\n")


async def test_a_client_that_half_closes_while_a_stream_is_written_reads_on(stage: Stage) -> None:
    client = await stage.client(GET % b"stream" + GET % b"a")
    await client.reader.readuntil(b"first,")
    client.writer.write_eof()
    stage.app.release.set()
    answers = await client.reader.read()
    assert b"last" in answers
    assert b'"/a"' in answers


async def test_a_client_that_half_closes_after_pipelined_requests_reads_on(stage: Stage) -> None:
    client = await stage.client(GET % b"held" + GET % b"a" + LAST % b"b")
    await stage.app.begun.get()
    client.writer.write_eof()
    stage.app.release.set()
    assert (await client.reader.read()).count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("more", [b"", b"\r\n", GET % b"health", post(b"x" * 10)[:-2], b"x" * MOST_EARLY_BYTES])
@pytest.mark.parametrize("how", ["close", "abort", "half"])
async def test_a_client_that_leaves_is_noticed_at_once(stage: Stage, more: bytes, how: str) -> None:
    client = await stage.client(GET % b"held")
    assert await stage.app.begun.get() == "/held"
    client.writer.write(more)
    if how == "half":
        client.writer.write_eof()
    else:
        client.writer.transport.close() if how == "close" else client.writer.transport.abort()
    assert await stage.app.left.get() == "/held"


async def test_a_client_that_leaves_after_more_than_is_kept_is_noticed(stage: Stage) -> None:
    client = await stage.client(GET % b"held")
    await stage.app.begun.get()
    client.writer.write(post(b"x" * (MOST_EARLY_BYTES + 1000)))
    client.writer.close()
    assert await stage.app.left.get() == "/held"


async def test_a_client_that_leaves_during_its_body_is_noticed(stage: Stage) -> None:
    client = await stage.client(post(b"x" * 10, b"a")[:-2])
    client.writer.write_eof()
    assert await stage.app.left.get() == "/a"
    assert await client.reader.read() == b""


# -- what they may cost


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"", ""),
        (b"\r\n", ""),
        (b"GET / HT", "request_timeout"),
        (post(b"x" * 100)[:-99], "request_timeout"),
        (CHUNKED + b"1\r\n", "request_timeout"),
    ],
)
async def test_what_does_not_arrive_is_not_waited_for(stage: Stage, sent: bytes, code: str) -> None:
    client = await stage.client(sent)
    await stage.until(lambda: len(stage.server.connections) > 0)
    for _ in range(3):
        await (await stage.client(GET % b"a")).answer()  # so that what was sent before has arrived
    stage.later(min(LIMITS.head_s, LIMITS.body_grace_s) - 1)
    stage.later(LIMITS.body_grace_s + LIMITS.head_s)
    if code:
        assert (await client.refusal())[1] == code
    else:
        assert await client.reader.read() == b""


async def test_a_second_head_that_does_not_arrive(stage: Stage) -> None:
    client = await stage.client(post(b"hi") + b"GET / HT")
    assert (await client.answer())[0] == 200
    stage.later(LIMITS.head_s + 1)
    assert (await client.refusal())[0] == 408


async def test_a_body_that_moves_is_waited_for(stage: Stage) -> None:
    client = await stage.client(post(b"x" * 100_000)[:-1])
    await stage.until(lambda: not stage.app.begun.empty() or len(stage.server.connections) > 0)
    await (await stage.client(GET % b"a")).answer()
    stage.later(LIMITS.body_grace_s + 90)
    client.writer.write(b"x")
    assert json.loads((await client.answer())[2])["bytes"] == 100_000


async def test_the_rest_of_a_request_that_was_answered_is_not_waited_for(stage: Stage) -> None:
    client = await stage.client(post(b"hi", b"early")[:-1])
    assert (await client.answer())[0] == 413
    client.writer.write(b"i" + post(b"hi", b"early")[:-1])
    assert (await client.answer())[0] == 413, "the rest has come in time"
    stage.later(LIMITS.linger_s + 1)
    assert await client.reader.read() == b""


async def test_a_connection_is_kept_for_a_while(stage: Stage) -> None:
    """Also if its last request was answered before all of it had come."""
    client = await stage.client(post(b"hi", b"early")[:-1])
    assert (await client.answer())[0] == 413
    client.writer.write(b"i" + GET % b"a")
    assert (await client.answer())[0] == 200
    client.writer.write(post(b"hi", b"early")[:-1])
    assert (await client.answer())[0] == 413
    client.writer.write(b"i")
    await stage.until(lambda: client_stage(stage) is ConnectionStage.KEPT)
    stage.later(LIMITS.keep_s - 1)
    client.writer.write(GET % b"a")
    assert (await client.answer())[0] == 200
    stage.later(LIMITS.keep_s + 1)
    assert await client.reader.read() == b""


def client_stage(stage: Stage) -> ConnectionStage:
    (connection,) = stage.server.connections.each()
    return connection.stage


async def test_an_answer_may_take_its_time(stage: Stage) -> None:
    client = await stage.client(GET % b"held")
    await stage.app.begun.get()
    stage.later(3600.0)
    stage.app.release.set()
    assert (await client.answer())[0] == 200


async def test_room_is_made_by_the_one_that_was_idle_for_longest(stage: Stage) -> None:
    """A connection that never said anything is closed before those that are kept alive; what is answered is left
    alone."""
    busy = await stage.client(GET % b"held")
    await stage.app.begun.get()
    kept = await stage.client(GET % b"a")
    await kept.answer()
    silent = [await stage.client() for _ in range(4)]
    await stage.until(lambda: len(stage.server.connections) == 6)
    newcomers = []
    for each in silent:
        newcomers.append(await stage.client(GET % b"health"))
        await newcomers[-1].answer()
        assert await each.reader.read() == b""
    kept.writer.write(GET % b"a")
    await kept.answer()
    await (await stage.client(GET % b"health")).answer()
    assert await newcomers[0].reader.read() == b"", "of those kept alive the one that has been quiet for longest"
    stage.app.release.set()
    assert (await busy.answer())[0] == 200


async def test_health_is_answered_from_a_reserve(stage: Stage) -> None:
    busy = [await stage.client(GET % b"held") for _ in range(4)]
    for _ in busy:
        await stage.app.begun.get()
    status, code, headers = await (await stage.client(GET % b"held")).refusal()
    assert (status, code, headers["retry-after"]) == (503, "overloaded", "1")
    for _ in range(3):
        assert (await (await stage.client(GET % b"health")).answer())[0] == 200
    stage.app.release.set()
    assert [(await client.answer())[0] for client in busy] == [200] * 4


SCENARIOS: list[Callable[[Stage], Coroutine[Any, Any, None]]] = [
    *(partial(test_pipelined_requests_are_answered_in_order, cut=cut) for cut in (1, 7, 1 << 20)),
    test_a_large_body,
    test_http_1_0,
    test_an_application_that_does_not_look_is_held_up,
    *(
        partial(test_a_client_that_half_closes_after_its_last_request_reads_on, path=path)
        for path in (b"held", b"stream")
    ),
    test_a_client_that_half_closes_while_a_stream_is_written_reads_on,
    test_a_client_that_half_closes_after_pipelined_requests_reads_on,
    *(
        partial(test_a_client_that_leaves_is_noticed_at_once, more=more, how=how)
        for more in (b"", GET % b"health")
        for how in ("close", "abort", "half")
    ),
    test_a_client_that_leaves_after_more_than_is_kept_is_noticed,
    test_a_client_that_leaves_during_its_body_is_noticed,
    test_room_is_made_by_the_one_that_was_idle_for_longest,
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_the_routers_own_event_loop(scenario: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    """It tells of a client's end in another way than asyncio's."""

    async def run() -> None:
        async with staged() as stage:
            await scenario(stage)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
