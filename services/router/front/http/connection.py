"""Bounds what one HTTP connection may cost, around the protocol of uvicorn that answers its requests.

uvicorn is given one request at a time, and only once its head is whole and within bounds; what a client sends beyond
that is kept here until the request is answered. So the socket is always read, and the end of a client is noticed.
What is refused here is answered by uvicorn and the app too, so that such an answer has all that others have. Owns:
the bytes of one connection and the time it may take. Never: how many connections there are (connections.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from services.core.addresses import network_of
from services.router.front.http.connections import Connections, ConnectionStage
from services.router.front.http.reply import REQUEST_ID, HttpError, plain_error, printable_header, refuse

MAX_HEAD_BYTES = 64 << 10
MAX_LINES = 128
"""The most lines of a request's head, and of the trailers after a chunked body. Proxies commonly allow 100."""
MOST_EARLY_BYTES = 64 << 10
"""The most bytes that are kept of what a client sends before its request is answered; then its socket is not read."""
_BYTES_OF_A_CHUNK = 8
"""A chunked body may have a byte beside its content for each so many bytes of it, and `MAX_HEAD_BYTES` more: sizes of
chunks, their extensions and trailers."""
_PIECE_BYTES = 64 << 10
"""The most bytes of a chunked body that are parsed at once: 8 ms if each chunk has one byte."""
_EMPTY_LINE_COSTS_BYTES = 64
"""What an empty line in a chunked body counts as, beside the content: what is parsed at once ends there, since the body
may do so, and it takes some microseconds however short it is."""
_END = b"\r\n\r\n"
_CLOSE = {"connection": "close"}
_KEY = "connection"
"""Where a scope's state has the connection."""
_HEALTH = "/health"
_CLOSE_WAIT = 8
"""The state of a TCP connection whose peer sends no more, in Linux's TCP_INFO."""
_ESTABLISHED = 1
_ABSOLUTE = re.compile(rb"https?://(?:[^/?#@]*@)?([^/?#@]+)([^#]*)(?:#.*)?", re.IGNORECASE)
_KEPT = re.compile(rb"^(?:%b|origin):[^\r\n]*" % REQUEST_ID.encode(), re.IGNORECASE | re.MULTILINE)
_OTHER_VERSION = re.compile(rb"\S+ +\S+ +HTTP/(?!1\.[01]\s)")
_FULL = plain_error(
    503, "the router has all the connections it can serve", "overloaded", {"retry-after": "1", **_CLOSE}
)
_MALFORMED = plain_error(400, "this is no HTTP request", "malformed_message", _CLOSE)
_VERSION = plain_error(505, "the server speaks HTTP/1.1", "http_version_not_supported", _CLOSE)
_TOO_LONG = plain_error(
    431,
    f"the request's headers or trailers have more than {MAX_HEAD_BYTES} bytes or {MAX_LINES} lines",
    "headers_too_large",
    _CLOSE,
)
_SMALL_CHUNKS = plain_error(400, "the body has too many small chunks", "malformed_message", _CLOSE)


class Request:
    """Parses one request, as uvicorn does, and keeps what its bounds depend on and what is done with it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes that were parsed: of the head until it is whole, then of the body as it was sent."""
        self.is_passed = False
        """Whether uvicorn has its head."""
        self.is_started = False
        """Whether its answer has begun."""
        self.is_answered = False
        self.head = b""
        self._num_trailers = 0
        self._body_bytes = 0
        self._num_empty_lines = 0
        self._last = b""
        """The last bytes that were parsed of a chunked body, if its end may begin there."""
        self._begin()

    def _begin(self) -> None:
        self.has_head = self.is_whole = self.keeps_alive = False
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._parser = httptools.HttpRequestParser(self)

    def take_head(self, received: bytearray) -> HttpError | None:
        """Parses what has come of the head, and takes it from `received` once it is whole. Returns why it is refused.

        Raises HttpParserError.
        """
        end = received.find(_END, max(0, self.num_bytes - len(_END) + 1))
        end = len(received) if (is_part := end < 0) else end + len(_END)
        new = bytes(received[self.num_bytes : min(end, MAX_HEAD_BYTES)])
        self.head += new
        self.num_bytes = end
        self.feed(new)
        if end > MAX_HEAD_BYTES or self.head.count(b"\n") > MAX_LINES + 1:
            return _TOO_LONG
        if is_part:
            return None
        del received[:end]
        self.num_bytes = 0
        return self._checked() if self.has_head else self.malformed()

    def take_body(self, received: bytearray) -> tuple[bytes, HttpError | None]:
        """Takes the next piece of the body, none of what follows it, and parses it. Returns the piece, or why it is
        refused. Raises HttpParserError."""
        if (length := self._header(b"content-length")) is not None:
            end = int(length) - self.num_bytes
        else:
            end = self._end_of_chunks(received)
        piece = bytes(received[:end])
        del received[:end]
        self.num_bytes += len(piece)
        self.feed(piece)
        if self._num_trailers > MAX_LINES:
            return b"", _TOO_LONG
        beside = self.num_bytes - self._body_bytes + self._num_empty_lines * _EMPTY_LINE_COSTS_BYTES
        if beside > MAX_HEAD_BYTES + self._body_bytes // _BYTES_OF_A_CHUNK:
            return b"", _SMALL_CHUNKS
        return piece, None

    def _end_of_chunks(self, received: bytearray) -> int:
        """Returns the number of bytes up to an empty line, with which a chunked body ends, or to the end of a piece."""
        at = (self._last + received[: len(_END) - 1]).find(_END) - len(self._last)
        if at < -len(self._last):
            at = received.find(_END, 0, _PIECE_BYTES)
            if at < 0:
                piece = received[:_PIECE_BYTES]
                self._last = bytes((self._last + piece)[1 - len(_END) :])
                return len(piece)
        self._last = b""
        self._num_empty_lines += 1
        return at + len(_END)

    def feed(self, data: bytes) -> None:
        """Raises HttpParserError."""
        with contextlib.suppress(httptools.HttpParserUpgrade):
            self._parser.feed_data(data)

    def _checked(self) -> HttpError | None:
        """Returns why a head that could be parsed is refused. Writes it anew if uvicorn would not understand it."""
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return _VERSION
        num_hosts = [name for name, _ in self._headers].count(b"host")
        absolute = _ABSOLUTE.fullmatch(self._target)
        if num_hosts > 1 or (not num_hosts and version == "1.1") or not (absolute or self._target.startswith(b"/")):
            return _MALFORMED
        if absolute or self._parser.should_upgrade():
            self.head = self._rewritten(absolute)
            self._begin()
            self.feed(self.head)
        httptools.parse_url(self._target)
        return None

    def _rewritten(self, absolute: re.Match[bytes] | None) -> bytes:
        """Returns the head with its target in origin form (RFC 9112, 3.2), and without an offer of another protocol:
        Java's client makes one beside a body, which httptools takes for the other protocol's."""
        host, target = absolute.groups() if absolute else (self._header(b"host"), self._target)
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        headers = [pair for pair in self._headers if pair[0] not in (b"host", b"upgrade")]
        if host is not None:
            headers.append((b"host", host))
        start = b"%b /%b HTTP/%b\r\n" % (method, target.removeprefix(b"/"), version)
        return start + b"".join(b"%b: %b\r\n" % pair for pair in headers) + b"\r\n"

    def malformed(self) -> HttpError:
        """Returns why a request that could not be parsed is refused."""
        return _VERSION if not self.is_passed and _OTHER_VERSION.match(self.head) else _MALFORMED

    def replacement(self) -> bytes:
        """Returns a head in the place of one that is refused, with which uvicorn can answer."""
        method = b"HEAD" if self.head.startswith(b"HEAD ") else b"GET"
        kept = b"".join(printable_header(line) + b"\r\n" for line in _KEPT.findall(self.head))
        return b"%b / HTTP/1.1\r\nconnection: close\r\n%b\r\n" % (method, kept)

    def _header(self, wanted: bytes) -> bytes | None:
        return next((value for name, value in self._headers if name == wanted), None)

    # What the parser reports

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.has_head:
            self._num_trailers += 1
        else:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.has_head = True
        self.keeps_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)

    def on_message_complete(self) -> None:
        self.is_whole = True


class BoundedConnection(asyncio.Protocol):
    """Passes one client's requests on to uvicorn. The limits run only while the client keeps the server waiting."""

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        on_made: Callable[[], None] = lambda: None,
    ) -> None:
        """The first arguments but one are uvicorn's own."""
        self.peer = ""
        self.stage = ConnectionStage.SILENT
        self.error: HttpError | None = None
        """What is answered in place of the app's answer; the connection ends with it."""
        self.patience: asyncio.Timeout | None = None
        """Ends the app's work on a request that is refused while it arrives."""
        self._uvicorn = HttpToolsProtocol(config, server_state, {**app_state, _KEY: self}, _loop)
        self._loop = asyncio.get_running_loop()
        self._all = connections
        self._on_made = on_made
        self._limits = connections.limits
        self._is_open = False
        self._transport: asyncio.Transport
        self._received = bytearray()
        """What was not parsed yet: a head that is not whole, or what came before its time."""
        self._request: Request | None = None
        self._since_s = 0.0
        """When its stage began, or when its request was answered before all of it came, in the event loop's seconds."""
        self._head_since_s = 0.0
        self._blocked_since_s: float | None = None
        self._is_paused = False
        self._has_ended = False
        """Whether the client sends no more."""

    # What the transport reports

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._on_made()
        self._transport = transport
        self._uvicorn.connection_made(transport)
        address = transport.get_extra_info("peername")
        self.peer = network_of(str(address[0])) if address else ""
        self._since_s = self._loop.time()
        self._is_open = self._all.open(self)
        if not self._is_open:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._uvicorn.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._advance()

    def eof_received(self) -> bool:
        """Returns whether the client may still read what it is answered, though it sends no more."""
        if self._has_ended:
            return True  # uvloop tells of it again when reading is resumed
        self._has_ended = True
        if self._transport.get_extra_info("sslcontext") is not None:
            return False  # the event loop's TLS cannot be half closed
        request = self._request
        if self.error is not None:
            return True
        if request is None or not request.is_whole:
            return False
        return request.is_started or not request.keeps_alive or _ends_with_close(self._received)

    def pause_writing(self) -> None:
        self._blocked_since_s = self._loop.time()
        self._uvicorn.pause_writing()

    def resume_writing(self) -> None:
        self._blocked_since_s = None
        self._uvicorn.resume_writing()

    # Requests

    def _advance(self) -> None:
        """Parses what was received, up to the end of a request."""
        while not self._transport.is_closing() and self.error is None and self._take_piece():
            pass
        if self.error is not None:
            self._received.clear()
        self._update()
        if self._has_ended and self.stage is not ConnectionStage.BUSY and self.error is None:
            self._transport.close()
        self._pace()

    def _take_piece(self) -> bool:
        """Returns whether there may be more to parse."""
        if (request := self._request) is None:
            # Empty lines before a request are ignored (RFC 9112, 2.2).
            del self._received[: len(self._received) - len(self._received.lstrip(b"\r\n"))]
            if not self._received:
                return False
            request = self._request = Request()
            self._head_since_s = self._loop.time()
        if request.is_whole or not self._received:
            return False
        try:
            if request.has_head:
                data, error = request.take_body(self._received)
            else:
                error = request.take_head(self._received)
                data = request.head if request.has_head else b""
        except httptools.HttpParserError:
            error = request.malformed()
        if error is not None:
            self._refuse(error)
            return False
        if data:
            request.is_passed = True
            self._uvicorn.data_received(data)
            self._next_if_done(request)
        return bool(data)

    def _refuse(self, error: HttpError) -> None:
        """Answers the request that is arriving with an error, or closes if it was answered."""
        self.error, request = error, self._request
        assert request is not None
        if not request.is_passed:
            request.is_whole = request.is_passed = True
            self._uvicorn.data_received(request.replacement())
        elif request.is_started:
            self._transport.close()
        elif self.patience is not None:
            self.patience.reschedule(self._loop.time())
        self._update()

    def noting(self, scope: Scope, send: Send) -> Send:
        """Returns `send` for the answer to the present request. It notes what has become of the answer."""
        request = self._request
        assert request is not None
        if scope["http_version"] == "1.0":
            send = _unframed(scope, send, self._transport)

        async def noted(message: Message) -> None:
            request.is_started = True
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                request.is_answered = True
                self._since_s = self._loop.time()
                self._next_if_done(request)
                self._advance()

        return noted

    def _next_if_done(self, request: Request) -> None:
        if request.is_whole and request.is_answered:
            self._request = None

    # Bounds

    def evict(self) -> None:
        """Closes the connection at once, for another's sake."""
        self._forget()
        self._transport.abort()

    def _forget(self) -> None:
        if self._is_open:
            self._is_open = False
            self._all.close(self)

    def check(self, now: float) -> None:
        """Ends the connection if its client has kept the server waiting for too long."""
        limits, request = self._limits, self._request
        if self._blocked_since_s is not None and now - self._blocked_since_s > limits.write_s:
            self._transport.abort()
        elif self.stage is ConnectionStage.BUSY:
            if self._is_paused and self._has_left():
                self._transport.abort()
        elif self.error is not None:
            pass  # the client waits for the server
        elif request is not None and request.is_answered:
            if now - self._since_s > limits.linger_s:
                self._transport.abort()
        elif request is not None and request.is_passed:
            elapsed_s = now - self._since_s - limits.body_grace_s
            is_slow = elapsed_s > 0 and request.num_bytes < elapsed_s * limits.body_bytes_per_s
            if is_slow and self._transport.is_reading():
                self._refuse(_too_slow("body"))
        elif request is not None:
            if now - self._head_since_s > limits.head_s:
                self._refuse(_too_slow("headers"))
        elif self.stage is ConnectionStage.SILENT and now - self._since_s > limits.head_s:
            self._transport.abort()
        # uvicorn has a timer for a connection that is kept alive and sends nothing.

    def _has_left(self) -> bool:
        """Returns whether the client has ended the connection, or its side of it, while its socket is not read."""
        request, sock = self._request, self._transport.get_extra_info("socket")
        state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        may_read_on = request is not None and (request.is_started or not request.keeps_alive)
        return state != _ESTABLISHED and not (state == _CLOSE_WAIT and may_read_on)

    def _pace(self) -> None:
        """Stops reading while much is kept. uvicorn may stop and resume it too, while a body arrives."""
        if self._transport.is_closing():
            return
        if len(self._received) > MOST_EARLY_BYTES:
            self._is_paused = True
            self._transport.pause_reading()
        elif self._is_paused or self.stage is ConnectionStage.BUSY:
            self._is_paused = False
            self._transport.resume_reading()

    def _update(self) -> None:
        """Sets its stage, after something has happened."""
        request = self._request
        if request is None or not request.is_passed:
            is_first = self.stage is ConnectionStage.SILENT
            stage = ConnectionStage.SILENT if is_first else ConnectionStage.KEPT
        else:
            stage = ConnectionStage.BUSY if request.is_whole else ConnectionStage.UPLOADING
        if stage is not self.stage and self._is_open:
            self._all.move(self, stage)
            self._since_s = self._loop.time()

    def has_room(self, path: str) -> bool:
        """Returns whether its request may be answered beside the others."""
        return path == _HEALTH or path.startswith(_HEALTH + "/") or self._all.has_room(self)


class Bounds:
    """Is the app around all others: it answers what was refused, and tells a connection what becomes of its request."""

    def __init__(self, app: ASGIApp, refusing: ASGIApp) -> None:
        self._app = app
        self._refusing = refusing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: BoundedConnection = scope["state"][_KEY]
        send = connection.noting(scope, send)
        if connection.error is None and not connection.has_room(str(scope.get("path", ""))):
            connection.error = _FULL
        if connection.error is None:
            try:
                async with asyncio.timeout(None) as connection.patience:
                    await self._app(scope, receive, send)
                return
            except TimeoutError:
                if connection.error is None:
                    raise
            finally:
                connection.patience = None
        await self._refusing(scope, receive, send)


async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request with the error that its connection has (an ASGI app)."""
    connection: BoundedConnection = scope["state"][_KEY]
    assert connection.error is not None
    await refuse(send, connection.error)


def _unframed(scope: Scope, send: Send, transport: asyncio.Transport) -> Send:
    """Returns `send` for a client of HTTP/1.0, which cannot read chunks: a body of unknown length ends with the
    connection. uvicorn is told that the answer is one to HEAD, and the body is written here."""
    is_unframed = False

    async def unframed(message: Message) -> None:
        nonlocal is_unframed
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            is_unframed = scope["method"] != "HEAD" and b"content-length" not in names
            if is_unframed:
                scope["method"] = "HEAD"
        elif is_unframed and message.get("body"):
            await send({"type": "http.response.body", "body": b"", "more_body": True})  # once there is room
            if not transport.is_closing():
                transport.write(message["body"])
        await send(message)

    return unframed


def _ends_with_close(received: bytearray) -> bool:
    """Returns whether these are requests, the last of which says that the client will send no more."""
    requests = Request()
    with contextlib.suppress(httptools.HttpParserError):
        requests.feed(bytes(received))
    return requests.is_whole and not requests.keeps_alive


def _too_slow(what: str) -> HttpError:
    return plain_error(408, f"the request's {what} did not arrive in time", "request_timeout", _CLOSE)
