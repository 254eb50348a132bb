"""Bounds what HTTP connections may cost, in front of the protocol of uvicorn that answers its requests.

What a client sends is parsed here, within bounds, and written anew for uvicorn, one request at a time. So uvicorn sees
only requests that it understands, the socket is always read, and the end of a client is noticed. What is refused is
answered by uvicorn and the app too, so that such an answer has all that others have.

A server that is full closes the connection that has been idle longest: one that never sent a request (a handshake of
TLS is one of these), else one that is kept alive, else one whose request is still arriving. A connection that is being
answered is never closed for another. Health is answered from a reserve, so that a probe learns the router's state even
when clients use up the rest. Owns: how many connections there are, in all and for each peer; the bytes of each and the
time it may take, TLS's handshake included.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import re
import types
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.core.addresses import network_of
from services.core.descriptors import share_of_descriptors
from services.router.answer import Room
from services.router.front.http.reply import DIRECT, REQUEST_ID, ROOM, HttpError, plain_error, printable_header, refuse
from services.rpc.certificates import Certificates

SWEEP_S = 0.5
# Share of the process's file descriptors. The rest is for gRPC (services/rpc/options.py), workers and files.
_SHARE_OF_DESCRIPTORS = 0.3
_MOST_CONNECTIONS = 8192
_RESERVE = 32
# One address may be a load balancer for all clients; it may also be one client that would keep the others out.
_SHARE_OF_A_PEER = 0.75


@dataclass(frozen=True)
class ConnectionLimits:
    max_connections: int
    max_per_peer: int
    """The most connections of one address, or of one /64 network."""
    reserve: int = _RESERVE
    """Connections beyond these bounds, for health."""
    head_s: float = 10.0
    """Seconds from a request's first byte, or from connecting, to the end of its headers."""
    keep_s: float = 75.0
    """Seconds from an answer to the next request. It is longer than common clients and load balancers keep a connection
    in their pools, so that they are the ones to close it."""
    body_grace_s: float = 10.0
    body_bytes_per_s: float = 1024.0
    """The lowest rate of a body after `body_grace_s`; a request whose body arrives more slowly is refused."""
    linger_s: float = 5.0
    """Seconds for the rest of a request that was answered before all of it arrived."""
    write_s: float = 60.0
    """Seconds in which a client must read enough to make room for more; otherwise its connection is closed."""


class ConnectionStage(enum.Enum):
    """What a connection does. They stand in the order in which connections are closed to make room."""

    SILENT = enum.auto()
    """No request has arrived yet."""
    KEPT = enum.auto()
    """One was answered and another may follow."""
    UPLOADING = enum.auto()
    """A request is arriving."""
    BUSY = enum.auto()
    """A request is being answered. It is never closed to make room."""


class Member(Protocol):
    """Is a connection, as those that bound them all see it."""

    peer: str
    stage: ConnectionStage

    def evict(self) -> None: ...

    def check(self, now: float) -> None: ...


class _Pool:
    """Keeps connections by stage; within each, those that have been in it longest come first."""

    def __init__(self) -> None:
        self.stages: dict[ConnectionStage, dict[Member, None]] = {stage: {} for stage in ConnectionStage}

    def __len__(self) -> int:
        return sum(map(len, self.stages.values()))

    def members(self) -> list[Member]:
        return [connection for members in self.stages.values() for connection in members]

    def oldest_idle(self) -> Member | None:
        oldest = next((connection for members in self.stages.values() for connection in members), None)
        return None if oldest is None or oldest.stage is ConnectionStage.BUSY else oldest


class Connections:
    """Keeps all connections of one server. Use it on the server's event loop only."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._all = _Pool()
        self._of_peers: dict[str, _Pool] = {}

    def __len__(self) -> int:
        return len(self._all)

    def open(self, connection: Member) -> bool:
        """Takes a connection in.

        Returns False if there is no room and no connection that can be closed to make room.
        """
        for pool, most in self._pools(connection):
            if len(pool) >= most + self.limits.reserve:
                victim = pool.oldest_idle()
                if victim is None:
                    return False
                victim.evict()
        for pool, _ in self._pools(connection):
            pool.stages[connection.stage][connection] = None
        return True

    def move(self, connection: Member, stage: ConnectionStage) -> None:
        """Notes a connection's stage, also that of one which was closed meanwhile."""
        for pool, _ in self._pools(connection):
            if connection in pool.stages[connection.stage]:
                del pool.stages[connection.stage][connection]
                pool.stages[stage][connection] = None
        connection.stage = stage

    def close(self, connection: Member) -> None:
        """Forgets a connection, if it is still kept."""
        for pool, _ in self._pools(connection):
            pool.stages[connection.stage].pop(connection, None)
        if not self._of_peers[connection.peer]:
            del self._of_peers[connection.peer]

    def has_room(self, connection: Member) -> bool:
        """Returns whether one more request may be answered, if it does not ask for health."""
        return all(len(pool.stages[ConnectionStage.BUSY]) <= most for pool, most in self._pools(connection))

    async def sweep_forever(self) -> None:
        """Ends connections that have kept the server waiting for too long."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for connection in self.each():
                connection.check(asyncio.get_running_loop().time())

    def each(self) -> list[Member]:
        return self._all.members()

    def _pools(self, connection: Member) -> list[tuple[_Pool, int]]:
        """Returns those that count the connection, with the most that each may have."""
        if connection.peer not in self._of_peers:
            self._of_peers[connection.peer] = _Pool()
        of_peer = self._of_peers[connection.peer]
        return [(of_peer, self.limits.max_per_peer), (self._all, self.limits.max_connections)]


def default_limits() -> ConnectionLimits:
    """Returns the limits that the process's file descriptors allow."""
    most = share_of_descriptors(_SHARE_OF_DESCRIPTORS, _MOST_CONNECTIONS)
    reserve = min(_RESERVE, max(1, most // 8))
    most = max(1, most - reserve)
    return ConnectionLimits(max_connections=most, max_per_peer=max(1, int(most * _SHARE_OF_A_PEER)), reserve=reserve)


log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""The most bytes of a request's head; and of what a chunked body has beside its content and an eighth of that: sizes of
chunks, their extensions and trailers."""
MAX_LINES = 128
"""The most lines of a request's head, and of the trailers after a chunked body. Proxies commonly allow 100."""
MOST_EARLY_BYTES = 64 << 10
"""The most bytes of requests that wait for the answer to an earlier one."""
_PIECE_BYTES = 4 << 10
"""Bytes that are parsed between two looks at the bounds: at most some 150 requests."""
_KEY = "connection"
"""Where a scope's state has the connection."""
_KEPT = re.compile(rb"^(%b|origin):([^\r\n]*)" % REQUEST_ID.encode(), re.IGNORECASE | re.MULTILINE)
"""Headers that the answer to a refused request depends on."""
_ABSOLUTE = re.compile(rb"https?://(?:[^/?#@]*@)?([^/?#@]+)([^#]*)(?:#.*)?", re.IGNORECASE)
_OTHER_VERSION = ("Invalid HTTP version", "Pause on PRI/Upgrade")
"""What httptools says of a version that it does not know, and of HTTP/2's first bytes."""


def _last_error(status: int, message: str, code: str, **headers: str) -> HttpError:
    return plain_error(status, message, code, {"connection": "close", **headers})


_FULL = _last_error(503, "the router has all the connections it can serve", "overloaded", **{"retry-after": "1"})
_MALFORMED = _last_error(400, "this is no HTTP request", "malformed_message")
_VERSION = _last_error(505, "the server speaks HTTP/1.1", "http_version_not_supported")
_TOO_LONG = _last_error(
    431, f"more than {MAX_HEAD_BYTES} bytes or {MAX_LINES} lines of headers, or of trailers", "headers_too_large"
)
_SMALL_CHUNKS = _last_error(400, "the body has too many small chunks", "malformed_message")
_TOO_EARLY = _last_error(
    400, f"more than {MOST_EARLY_BYTES} bytes came before an earlier request was answered", "too_early"
)
_SLOW_HEAD = _last_error(408, "the request's headers did not arrive in time", "request_timeout")
_SLOW_BODY = _last_error(408, "the request's body did not arrive in time", "request_timeout")


@dataclass(eq=False)
class Request:
    """Is a request from its first byte until it has come whole and was answered."""

    out: bytearray = field(default_factory=bytearray)
    """What uvicorn is to be given next."""
    target: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    num_lines: int = 1
    """Lines of its head, then of its trailers."""
    content_bytes: int = 0
    other_bytes: int = 0
    """Bytes of its head; then those of its body that are no content. The piece in which it begins is not counted."""
    has_head: bool = False
    is_whole: bool = False
    is_chunked: bool = False
    keeps_alive: bool = True
    is_passed: bool = False
    """Whether uvicorn has its head."""
    is_started: bool = False
    """Whether its answer has begun."""
    is_answered: bool = False
    error: HttpError | None = None
    """What is answered in place of the app's answer; the connection ends with it."""
    patience: asyncio.Timeout | None = None
    """Ends the app's work on it if it is refused while its body arrives."""


class Requests:
    """Parses what a client sends, and keeps its requests in their order until they are done with."""

    def __init__(self) -> None:
        self.all: list[Request] = []
        """The first is the one that is answered; the last may be arriving."""
        self.is_refused = False
        """Whether the last is refused, and nothing more is parsed."""
        self.is_cut = False
        """Whether the answer to the last has begun, so that it cannot be told."""
        self._head = bytearray()
        """What has come of a head that is not whole, with what came just before it."""
        self._parser: Any = httptools.HttpRequestParser(self)

    def end(self) -> None:
        """Lets go of the parser, which refers to these requests: nothing more is parsed."""
        self._parser = None

    @property
    def first(self) -> Request | None:
        return self.all[0] if self.all else None

    @property
    def arriving(self) -> Request | None:
        return self.all[-1] if self.all and not self.all[-1].is_whole else None

    def parse(self, data: bytes) -> None:
        """Parses what has come, up to what is refused."""
        for start in range(0, len(data), _PIECE_BYTES):
            if self.is_refused:
                return
            piece, before = data[start : start + _PIECE_BYTES], self.arriving
            self._head += piece
            self._parse_piece(piece)
            if self.arriving is None or self.arriving.has_head:
                self._head.clear()
            if before is not None and before is self.arriving:
                before.other_bytes += len(piece)
                if before.other_bytes > MAX_HEAD_BYTES + before.content_bytes // 8:
                    self.refuse(_SMALL_CHUNKS if before.has_head else _TOO_LONG)
            if sum(len(request.out) for request in self.all[1:]) > MOST_EARLY_BYTES:
                self.refuse(_TOO_EARLY)

    def _parse_piece(self, piece: bytes) -> None:
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as offer:
            # Java's client offers HTTP/2 beside a body, which httptools takes for the other protocol's. What is written
            # for uvicorn has no offer: parse that.
            self._parse_piece(bytes(self.all.pop().out) + piece[offer.args[0] :])
        except httptools.HttpParserCallbackError:
            if not self.is_refused:
                raise
        except httptools.HttpParserError as error:
            self.refuse(_VERSION if str(error) in _OTHER_VERSION else _MALFORMED)

    def refuse(self, error: HttpError) -> None:
        """Has the request that is arriving answered with an error, if its answer has not begun."""
        self.is_refused = True
        if (request := self.arriving) is None:
            self.all.append(request := Request())
        if request.is_started:
            self.is_cut = True
            return
        request.error = error
        if not request.is_passed:
            method = b"HEAD" if self._parser.get_method() == b"HEAD" else b"GET"
            head = request.out if request.has_head else self._head.rstrip().rpartition(b"\r\n\r\n")[2]
            headers = [(name, printable_header(value.strip())) for name, value in _KEPT.findall(head)]
            request.out = _head(method, b"/", "1.1", [*headers, (b"connection", b"close")])
            request.has_head = request.is_whole = True
        elif request.patience is not None:
            request.patience.reschedule(0.0)

    def _stop(self, error: HttpError) -> NoReturn:
        """Refuses a request and has the parser stop there."""
        self.refuse(error)
        raise ValueError(error.body)

    # What the parser reports

    def on_message_begin(self) -> None:
        self.all.append(Request())

    def on_url(self, url: bytes) -> None:
        self.all[-1].target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self.all[-1]
        request.num_lines += 1
        if request.num_lines > MAX_LINES:
            self._stop(_TOO_LONG)
        if not request.has_head:
            request.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        request, version, method = self.all[-1], self._parser.get_http_version(), self._parser.get_method()
        if version not in ("1.0", "1.1"):
            self._stop(_VERSION)
        if sum(len(name) + len(value) for name, value in request.headers) > MAX_HEAD_BYTES:
            self._stop(_TOO_LONG)
        hosts, target = [value for name, value in request.headers if name == b"host"], request.target
        absolute = _ABSOLUTE.fullmatch(target)
        if len(hosts) > 1 or (not hosts and version == "1.1") or not (absolute or target.startswith(b"/")):
            self._stop(_MALFORMED)
        if absolute:  # RFC 9112, 3.2.2
            hosts, target = [absolute[1]], b"/" + absolute[2].removeprefix(b"/")
        headers = [pair for pair in request.headers if pair[0] not in (b"host", b"upgrade")]
        request.out = _head(method, target, version, [*headers, *((b"host", host) for host in hosts)])
        request.is_chunked = any(name == b"transfer-encoding" for name, _ in headers)
        request.keeps_alive = self._parser.should_keep_alive()
        request.has_head = True
        request.num_lines = request.other_bytes = 0

    def on_body(self, body: bytes) -> None:
        request = self.all[-1]
        request.content_bytes += len(body)
        request.other_bytes -= len(body)
        request.out += b"%x\r\n%b\r\n" % (len(body), body) if request.is_chunked else body

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():
            self.all[-1].is_whole = True
            self.all[-1].out += b"0\r\n\r\n" if self.all[-1].is_chunked else b""


class BoundedConnection(asyncio.Protocol):
    """Passes one client's requests on to uvicorn. The limits run only while the client keeps the server waiting."""

    def __init__(
        self, connections: Connections, certificates: Certificates | None, *, app_state: dict[str, Any], **others: Any
    ) -> None:
        """`certificates` are those by which it speaks TLS, if it does. The named arguments are uvicorn's own."""
        self.peer = ""
        self.stage = ConnectionStage.SILENT
        self.requests = Requests()
        self.transport: asyncio.Transport
        self._room = Room()
        self._uvicorn = HttpToolsProtocol(app_state={**app_state, _KEY: self, ROOM: self._room}, **others)
        self._loop = asyncio.get_running_loop()
        self._all = connections
        self._certificates = certificates
        self._handshake: asyncio.Task[None] | None = None
        self._is_agreed = certificates is None
        """Whether requests are passed on: in TLS only once it says that its handshake has ended."""
        self._awaited: tuple[object, ...] = ()
        """What the client is to do next."""
        self._since_s = 0.0
        """Since when it is awaited, in the event loop's seconds."""
        self._blocked_since_s: float | None = None
        self._has_ended = False
        """Whether the client sends no more."""

    # What the transport reports

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._uvicorn.connection_made(transport)
        address = transport.get_extra_info("peername")
        self.peer = network_of(str(address[0])) if address else ""
        self._since_s = self._loop.time()
        if not self._all.open(self):
            transport.abort()
        elif self._certificates is not None:
            upgrade = self._loop.start_tls(transport, self, self._certificates.server_context(), server_side=True)
            # It must take the transport over at once: a task would begin later, and uvloop reads when this returns.
            self._handshake = self._loop.create_task(
                self._agree(_continued(upgrade, upgrade.send(None))), name="http tls"
            )

    async def _agree(self, upgrade: Awaitable[asyncio.Transport | None]) -> None:
        secure: asyncio.Transport | None = None
        try:
            secure = await upgrade
        except OSError as error:  # TLS's own errors are of this kind too
            log.debug("no TLS with %s: %s", self.peer, error)
        if secure is None or secure.is_closing():
            self.connection_lost(None)  # the event loop does not tell of it
            return
        self.transport = secure
        self._uvicorn.connection_made(secure)
        self._is_agreed = True
        self.advance()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.close(self)
        self._uvicorn.connection_lost(exc)
        # What refers to one another stays until Python looks for circles, which it does rarely (core/garbage.py).
        self.requests.end()
        self._uvicorn.app_state = {}
        self._uvicorn.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.requests.parse(data)
        self.advance()

    def eof_received(self) -> bool:
        """Returns whether the client may still read what it is answered, though it sends no more."""
        self._has_ended = True
        self.advance()
        if self._certificates is not None or not self.requests.all:
            return False  # the event loop's TLS cannot be half closed
        first, last = self.requests.all[0], self.requests.all[-1]
        has_said_so = last.is_whole and last.error is None and not last.keeps_alive
        return first.error is not None or (first.is_whole and (first.is_started or has_said_so))

    def pause_writing(self) -> None:
        self._blocked_since_s = self._loop.time()
        self._room.is_there = False
        self._uvicorn.pause_writing()

    def resume_writing(self) -> None:
        self._blocked_since_s = None
        self._uvicorn.resume_writing()
        self._room.made()

    def advance(self) -> None:
        """Passes on what has come of the first request, and drops those that are done with."""
        while self._is_agreed and (first := self.requests.first) and not self.transport.is_closing():
            if first.out:
                data, first.out, first.is_passed = bytes(first.out), bytearray(), True
                self._uvicorn.data_received(data)
            elif first.is_whole and first.is_answered:
                del self.requests.all[0]
            else:
                break
        first = self.requests.first
        self._update(first)
        may_be_answered = first is not None and (first.is_whole or first.error is not None)
        if self.requests.is_cut or (self._has_ended and not may_be_answered):
            self.transport.close()

    def _update(self, first: Request | None) -> None:
        awaited = (first, first and first.has_head, first and first.is_answered)
        if awaited != self._awaited:
            self._awaited, self._since_s = awaited, self._loop.time()
        if first is None or not first.has_head:
            stage = ConnectionStage.SILENT if self.stage is ConnectionStage.SILENT else ConnectionStage.KEPT
        else:
            stage = ConnectionStage.BUSY if first.is_whole else ConnectionStage.UPLOADING
        if stage is not self.stage:
            self._all.move(self, stage)

    # Bounds

    def evict(self) -> None:
        """Closes the connection at once, for another's sake."""
        self._all.close(self)
        self.transport.abort()

    def check(self, now: float) -> None:
        """Ends the connection if its client has kept the server waiting for too long."""
        limits, first = self._all.limits, self.requests.first
        since_s, limit_s, error = self._since_s, math.inf, None
        if self._blocked_since_s is not None:
            since_s, limit_s = self._blocked_since_s, limits.write_s
        elif first is None:
            limit_s = limits.head_s if self.stage is ConnectionStage.SILENT else limits.keep_s
        elif first.is_whole or first.error is not None:
            pass  # the client waits for the server
        elif first.is_answered:
            limit_s = limits.linger_s
        elif not first.has_head:
            limit_s, error = limits.head_s, _SLOW_HEAD
        elif self.transport.is_reading():
            limit_s, error = limits.body_grace_s + first.content_bytes / limits.body_bytes_per_s, _SLOW_BODY
        if now - since_s > limit_s and error is not None:
            self.requests.refuse(error)
            self.advance()
        elif now - since_s > limit_s:
            self.transport.abort()


class Bounds:
    """Is the app around all others: it answers what was refused, and tells a connection what becomes of its request."""

    def __init__(self, app: ASGIApp, around: Callable[[ASGIApp], ASGIApp], connections: Connections) -> None:
        self._app = app
        self._around = around(self._answer)
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: BoundedConnection = scope["state"][_KEY]
        request = connection.requests.all[0]
        if scope["http_version"] == "1.0":
            send = _unframed(scope, send, connection.transport)
        scope["state"][DIRECT] = send

        async def noted(message: Message) -> None:
            request.is_started = True
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                request.is_answered = True
                connection.advance()

        try:
            async with asyncio.timeout(None) as request.patience:
                await self._around(scope, receive, noted)
        except TimeoutError:
            if request.error is None or request.is_started:
                raise
            await self._around(scope, receive, noted)  # which refuses it this time
        finally:
            scope["state"].clear()  # it has what refers to the scope

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: BoundedConnection = scope["state"][_KEY]
        request = connection.requests.all[0]
        has_room = scope["path"].startswith(("/health", "/ping")) or self._connections.has_room(connection)
        if request.error is None and not has_room:
            request.error = _FULL
        if request.error is not None:
            await refuse(send, request.error)
        else:
            await self._app(scope, receive, send)


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
            if message.get("more_body", False):
                return  # uvicorn has nothing to write, and would wait if that was more than there was room for
        await send(message)

    return unframed


@types.coroutine
def _continued(begun: Any, step: Any) -> Generator[Any, Any, Any]:
    """Awaits a coroutine that was begun by `send`, which returned `step`."""
    yield step
    return (yield from begun)


def _head(method: bytes, target: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bytearray:
    lines = b"".join(b"%b: %b\r\n" % pair for pair in headers)
    return bytearray(b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version.encode(), lines))
