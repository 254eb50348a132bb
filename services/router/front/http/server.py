"""Runs the router's HTTP server: uvicorn inside the router's event loop, and bounds on what its connections may cost.

Connections are bounded in number, in total and for each peer, and in how long each may keep the server waiting. A
server that is full closes the connection that has been idle longest: one that never sent a request (a handshake of TLS
is one of these), else one that is kept alive, else one whose request is still arriving. A connection that is being
answered is never closed for another. Health is answered from a reserve, so that a probe learns the router's state even
when clients use up the rest. Owns: the port and its connections. Never: what is answered, or how large a request may be
(body.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import http
import logging
import socket
import ssl
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from services.core.addresses import network_of
from services.core.descriptors import share_of_descriptors
from services.core.listening import cannot_listen
from services.router.front.http.parser import BoundedParser
from services.router.front.http.reply import HttpError, dump, plain_error, refuse
from services.rpc.certificates import Certificates

log = logging.getLogger(__name__)

SWEEP_S = 0.5
# Parsing costs by the line, most of all in bodies of tiny chunks: 25 µs for six bytes. What has many lines is parsed in
# slices, each of a few milliseconds at the most, and only for so long in each turn of the event loop.
_MANY_LINES = 64
_SLICE_BYTES = 1024
_PARSE_S = 0.005
_PARSE_ONE_S = 0.001
_HEALTH = "/health"
_NO_BODY = frozenset({"HEAD", "CONNECT", 204, 304})
"""Methods and statuses whose answers have no body."""
_FULL = plain_error(
    503, "the router has all the connections it can serve", "overloaded", {"retry-after": "1", "connection": "close"}
)


@dataclass(frozen=True)
class ConnectionLimits:
    max_connections: int
    max_per_peer: int
    """The most connections of one address, or of one /64 network."""
    reserve: int = 32
    """Connections beyond these bounds, for health."""
    head_s: float = 10.0
    """Seconds from a request's first byte, or from connecting, to the end of its headers."""
    body_grace_s: float = 10.0
    body_bytes_per_s: float = 1024.0
    """The lowest rate of a body after `body_grace_s`; a request whose body arrives more slowly is refused."""
    linger_s: float = 5.0
    """Seconds for the rest of a request that was answered before all of it arrived."""
    write_s: float = 60.0
    """Seconds in which a client must read enough to make room for more; otherwise its connection is closed."""


class ConnectionStage(enum.Enum):
    SILENT = enum.auto()
    """No request has arrived yet."""
    KEPT = enum.auto()
    """One was answered and another may follow."""
    UPLOADING = enum.auto()
    """A request is arriving."""
    BUSY = enum.auto()
    """A request is being answered."""


class Member(Protocol):
    """Is a connection, as those that bound them all see it."""

    peer: str
    stage: ConnectionStage

    def evict(self) -> None: ...

    def check(self, now: float) -> None: ...


class _Pool:
    """Keeps connections by stage; within each, those that have been in it longest come first."""

    def __init__(self) -> None:
        self._members: dict[ConnectionStage, dict[Member, None]] = {stage: {} for stage in ConnectionStage}

    def __len__(self) -> int:
        return sum(map(len, self._members.values()))

    @property
    def num_busy(self) -> int:
        return len(self._members[ConnectionStage.BUSY])

    def put(self, connection: Member) -> None:
        self._members[connection.stage][connection] = None

    def take(self, connection: Member) -> None:
        self._members[connection.stage].pop(connection, None)

    def oldest_idle(self) -> Member | None:
        for stage in (ConnectionStage.SILENT, ConnectionStage.KEPT, ConnectionStage.UPLOADING):
            for connection in self._members[stage]:
                return connection
        return None


class Connections:
    """Keeps all connections of one server. Use it on the server's event loop only."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._all = _Pool()
        self._of_peers: dict[str, _Pool] = {}
        self._parsing: dict[BoundedConnection, None] = {}
        """Connections with data still to be parsed, in the order of their turns."""

    def __len__(self) -> int:
        return len(self._all)

    def parse_later(self, connection: BoundedConnection) -> None:
        """Parses what the connection has received, in turns with the others and with all else on the event loop."""
        if not self._parsing:
            asyncio.get_running_loop().call_soon(self._parse)
        self._parsing[connection] = None

    def _parse(self) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _PARSE_S
        while self._parsing and loop.time() < until_s:
            connection = next(iter(self._parsing))
            del self._parsing[connection]
            try:
                has_more = connection.parse_some(_PARSE_ONE_S)
            except Exception:  # as the event loop treats a protocol that raises
                log.exception("a connection of %s is closed: its data could not be handled", connection.peer)
                connection.evict()
                continue
            if has_more:
                self._parsing[connection] = None
        if self._parsing:
            loop.call_soon(self._parse)

    def open(self, connection: Member) -> bool:
        """Takes a connection in.

        Returns False if there is no room and no connection that can be closed to make room.
        """
        for pool, most in self._pools(connection.peer):
            while len(pool) >= most + self.limits.reserve:
                victim = pool.oldest_idle()
                if victim is None:
                    return False
                victim.evict()
        for pool, _ in self._pools(connection.peer):
            pool.put(connection)
        return True

    def move(self, connection: Member, stage: ConnectionStage) -> None:
        for pool, _ in self._pools(connection.peer):
            pool.take(connection)
        connection.stage = stage
        for pool, _ in self._pools(connection.peer):
            pool.put(connection)

    def close(self, connection: Member) -> None:
        for pool, _ in self._pools(connection.peer):
            pool.take(connection)
        if not self._of_peers[connection.peer]:
            del self._of_peers[connection.peer]

    def has_room(self, connection: BoundedConnection) -> bool:
        """Returns whether one more request may be answered, if it does not ask for health."""
        return all(pool.num_busy <= most for pool, most in self._pools(connection.peer))

    async def sweep_forever(self) -> None:
        """Ends connections that have kept the server waiting for too long."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            for connection in self.each():
                connection.check(loop.time())

    def each(self) -> list[Member]:
        return [connection for members in self._all._members.values() for connection in members]

    def _pools(self, peer: str) -> Iterator[tuple[_Pool, int]]:
        yield self._of_peers.setdefault(peer, _Pool()), self.limits.max_per_peer
        yield self._all, self.limits.max_connections


class _PausedWhileParsing(FlowControl):
    """Reads nothing more while what was read is still to be parsed, whatever the application asks for."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_parsing = False

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            if not self._is_parsing:
                self._transport.resume_reading()

    def parsing(self) -> None:
        self._is_parsing = True
        self._transport.pause_reading()

    def parsed(self) -> None:
        self._is_parsing = False
        if not self.read_paused:
            self._transport.resume_reading()


class BoundedConnection(H11Protocol):
    """Bounds the time that one connection takes. The limits run only while its client keeps the server waiting."""

    flow: _PausedWhileParsing
    conn: BoundedParser

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = BoundedParser()
        self.handshake: Handshake | None = None
        """What it was before, inside TLS."""
        self.peer = ""
        self.stage = ConnectionStage.SILENT
        self._answers = self.app
        self.app = self._answer
        self._all = connections
        self._limits = connections.limits
        self._is_open = False
        self._since_s = 0.0
        """When its current stage began, in the event loop's seconds."""
        self._head_since_s: float | None = None
        """When a request's headers began to arrive; None if none are arriving."""
        self._num_bytes = 0
        """Bytes received in the current stage."""
        self._blocked_since_s: float | None = None
        self._closing_since_s: float | None = None
        self._unparsed = bytearray()

    # What the transport reports

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.handshake is not None:
            self.handshake.over()
        super().connection_made(transport)
        self.flow = _PausedWhileParsing(transport)
        self.peer = network_of(self.client[0]) if self.client else ""
        self._since_s = self.loop.time()
        self._is_open = self._all.open(self)
        if not self._is_open:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_open:
            return
        self._num_bytes += len(data)
        if self._head_since_s is None and self.stage in (ConnectionStage.SILENT, ConnectionStage.KEPT):
            self._head_since_s = self.loop.time()
        if self._unparsed:
            self._unparsed += data
        elif data.count(b"\n") > _MANY_LINES:
            self._unparsed += data
            self.flow.parsing()
            self._all.parse_later(self)
        else:
            self._parse(data)

    def parse_some(self, seconds: float) -> bool:
        """Parses received data for about so long. Returns whether there is more of it."""
        until_s = self.loop.time() + seconds
        while self._unparsed and self._is_open and not self.transport.is_closing():
            if self.conn.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
                return False  # the next request, if there may be one, is parsed when this one has been answered
            data = bytes(self._unparsed[:_SLICE_BYTES])
            del self._unparsed[:_SLICE_BYTES]
            self._parse(data)
            if self._unparsed and not self.transport.is_closing():
                self.flow.parsing()  # uvicorn reads on when the rest of an answered request has come
            if self.loop.time() >= until_s and self._unparsed:
                return True
        self._unparsed.clear()
        if not self.transport.is_closing():
            self.flow.parsed()
        return False

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        self._update()

    def pause_writing(self) -> None:
        self._blocked_since_s = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._blocked_since_s = None
        super().resume_writing()

    # What uvicorn calls

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unparsed:
            self._all.parse_later(self)
        if self._head_since_s is None and (self._unparsed or self.conn.trailing_data[0]):
            self._head_since_s = self.loop.time()  # the next request has begun to arrive
        self._update()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self.conn.refusal)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", ""))
        if path == _HEALTH or path.startswith(_HEALTH + "/") or self._all.has_room(self):
            await self._answers(scope, receive, self._quick(send) if scope["http_version"] == "1.1" else send)
        else:
            await refuse(scope, send, _FULL)

    def _quick(self, send: Send) -> Send:
        """Returns `send`, but with the parts of a body whose length is not known written here: h11 would frame each
        in the same way (RFC 9112, 7.1), and its state does not change before the end of the body. A streamed token is
        such a part, and costs half as much so."""
        is_chunked, cycle, flow, transport = False, self.cycle, self.flow, self.transport

        async def quick_send(message: Message) -> None:
            nonlocal is_chunked
            if is_chunked and message.get("more_body") and (data := message.get("body")):
                if flow.write_paused and not cycle.disconnected:
                    await flow.drain()
                if not cycle.disconnected:
                    transport.write(b"%x\r\n%b\r\n" % (len(data), data))
                return
            await send(message)
            is_start, has_body = message["type"] == "http.response.start", cycle.scope["method"] not in _NO_BODY
            if is_start and has_body and message["status"] not in _NO_BODY:
                names = {name.lower() for name, _ in message["headers"]}
                is_chunked = not names & {b"content-length", b"transfer-encoding"}
            elif not is_start:
                is_chunked = is_chunked and not cycle.response_complete

        return quick_send

    # What keeps it within its limits

    def evict(self) -> None:
        """Closes the connection to make room for another."""
        self._forget()
        self.transport.abort()

    def check(self, now: float) -> None:
        """Ends the connection if its client has kept the server waiting for too long."""
        limits = self._limits
        if self.transport.is_closing():
            self._closing_since_s = self._closing_since_s or now
            if now - self._closing_since_s > limits.write_s:
                self.transport.abort()
        elif self._blocked_since_s is not None:
            if now - self._blocked_since_s > limits.write_s:
                self.transport.abort()
        elif self.stage is ConnectionStage.UPLOADING:
            elapsed_s = now - self._since_s - limits.body_grace_s
            is_waited_for = not self.flow.read_paused and not self._unparsed
            if elapsed_s > 0 and self._num_bytes < elapsed_s * limits.body_bytes_per_s and is_waited_for:
                self._refuse(_too_slow("body"))
        elif self.stage is ConnectionStage.BUSY:
            pass  # the client waits for the server
        elif self.conn.their_state is h11.SEND_BODY:
            if now - self._since_s > limits.linger_s:
                self.transport.abort()
        elif self._unparsed:
            pass  # the client waits for its turn
        elif self._head_since_s is not None:
            if now - self._head_since_s > limits.head_s:
                self._refuse(_too_slow("headers"))
        elif self.stage is ConnectionStage.SILENT and now - self._since_s > limits.head_s:
            self.transport.abort()
        # uvicorn has a timer for a connection that is kept alive and sends nothing.

    def _update(self) -> None:
        """Sets its stage, after something has happened."""
        if not self._is_open:
            return
        if self.cycle is None or self.cycle.response_complete:
            stage = ConnectionStage.SILENT if self.cycle is None else ConnectionStage.KEPT
        else:
            stage = ConnectionStage.UPLOADING if self.cycle.more_body else ConnectionStage.BUSY
            self._head_since_s = None
        if stage is not self.stage:
            self._all.move(self, stage)
            self._since_s, self._num_bytes = self.loop.time(), len(self._unparsed)

    def _refuse(self, error: HttpError) -> None:
        """Answers with an error a client that did not finish its request; closes, or aborts if an answer has begun."""
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.response_complete
        if is_answering and cycle.response_started:
            self.transport.abort()
            return
        body = dump(error.body)
        head = f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        if is_answering:
            cycle.disconnected = True  # the handler need not wait for the rest of the request
            cycle.message_event.set()
        self.transport.close()

    def _forget(self) -> None:
        if self._is_open:
            self._is_open = False
            self._all.close(self)


class Handshake:
    """Is a connection until TLS has been agreed on: then one of HTTP takes its place.

    It counts as a connection that has sent nothing, so that handshakes which are never ended keep nobody out.
    """

    def __init__(self, connections: Connections, accepted: socket.socket, peer: str) -> None:
        self.peer = peer
        self.stage = ConnectionStage.SILENT
        self._all = connections
        self._accepted = accepted
        self._is_open = connections.open(self)

    @property
    def is_open(self) -> bool:
        """Returns whether there was room for it, and it is still under way."""
        return self._is_open

    def evict(self) -> None:
        """Ends the handshake to make room for another connection."""
        self.over()
        with contextlib.suppress(OSError):  # the peer has left
            self._accepted.shutdown(socket.SHUT_RDWR)  # its transport closes it

    def check(self, now: float) -> None:
        """Does nothing: the handshake has a time limit of its own."""

    def over(self) -> None:
        """Says that it is under way no more."""
        if self._is_open:
            self._is_open = False
            self._all.close(self)


def _too_slow(what: str) -> HttpError:
    return plain_error(408, f"the request's {what} did not arrive in time", "request_timeout")


_BACKLOG = 2048
# Longer than common clients and load balancers keep a connection in their pools, so that they are the ones to close it.
_KEEP_ALIVE_S = 75
_GRACE_S = 1
_ACCEPT_AGAIN_S = 1.0
# Share of the process's file descriptors. The rest is for gRPC (services/rpc/options.py), workers and files.
_SHARE_OF_DESCRIPTORS = 0.3
_MOST_CONNECTIONS = 8192
_RESERVE = 32
# One address may be a load balancer for all clients; it may also be one client that would keep the others out.
_SHARE_OF_A_PEER = 0.75


def default_limits() -> ConnectionLimits:
    """Returns the limits that the process's file descriptors allow."""
    most = share_of_descriptors(_SHARE_OF_DESCRIPTORS, _MOST_CONNECTIONS)
    reserve = min(_RESERVE, max(1, most // 8))
    most = max(1, most - reserve)
    return ConnectionLimits(max_connections=most, max_per_peer=max(1, int(most * _SHARE_OF_A_PEER)), reserve=reserve)


class HttpServer:
    """Runs the HTTP server: call `start`, then `stop`, both on the event loop. `port` is the port that was bound."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        limits: ConnectionLimits | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        """`limits` are those of its connections; by default what the process's file descriptors allow. With
        `certificates` it speaks TLS alone, and asks for certificates if they have CAs."""
        self.port = port
        self.connections = Connections(limits or default_limits())
        self._host = host
        self._server = _Embedded(_config(app, self.connections), self.connections, certificates)
        self._serving: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def serving(self) -> asyncio.Task[None]:
        """Returns the task that serves. It ends only with `stop`, or by a defect."""
        assert self._serving is not None, "not started"
        return self._serving

    async def start(self) -> None:
        """Starts to listen. Raises ConfigError if the port is taken or the host is not this machine's."""
        listener = _listen(self._host, self.port)
        self.port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        self._sweeping = asyncio.create_task(self.connections.sweep_forever(), name="http connections")
        await self._server.listening.wait()

    async def stop(self) -> None:
        """Stops listening, gives answers under way a second to be sent, and closes what is left."""
        if self._serving is None or self._sweeping is None:
            return
        self._server.should_exit = True
        await self._serving
        self._sweeping.cancel()
        await asyncio.gather(self._sweeping, return_exceptions=True)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


class _Embedded(uvicorn.Server):
    """Runs a uvicorn server that leaves the process's signals alone and reports when it listens."""

    def __init__(self, config: uvicorn.Config, connections: Connections, certificates: Certificates | None) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._connections = connections
        self._certificates = certificates
        self._tasks: set[asyncio.Task[None]] = set()
        """Accepts connections in TLS, and shakes hands with each."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._certificates is None:
            await super().startup(sockets)
        else:
            # As the event loop would accept them, nobody would know of connections before their handshakes have ended.
            assert sockets is not None
            self.servers, self.started = [], True
            for listener in sockets:
                self._spawn(self._accept(listener, self._certificates))
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().shutdown(sockets)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="http tls")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, certificates: Certificates) -> None:
        listener.setblocking(False)
        while True:
            try:
                accepted, address = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                log.warning("no connection can be accepted for now: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            handshake = Handshake(self._connections, accepted, network_of(str(address[0])))
            if handshake.is_open:
                self._spawn(self._agree(handshake, accepted, certificates.http_context()))
            else:
                accepted.close()
            await asyncio.sleep(0)  # whoever connects without end does not keep the event loop

    async def _agree(self, handshake: Handshake, accepted: socket.socket, context: ssl.SSLContext) -> None:
        def make() -> BoundedConnection:
            connection: BoundedConnection = self.config.http_protocol_class(  # type: ignore[call-arg, assignment]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            connection.handshake = handshake
            return connection

        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                make, accepted, ssl=context, ssl_handshake_timeout=self._connections.limits.head_s
            )
        except OSError as error:  # TLS's own errors, and that of the time limit, are of this kind too
            log.debug("no TLS with %s: %s", handshake.peer, error)
        finally:
            handshake.over()


def _config(app: ASGIApp, connections: Connections) -> uvicorn.Config:
    protocol: Any = functools.partial(BoundedConnection, connections)  # uvicorn calls it like a class
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # clients are told of their errors in the response
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=kind, backlog=_BACKLOG)
    except OSError as error:
        raise cannot_listen("--http-port", host, port, error) from error
