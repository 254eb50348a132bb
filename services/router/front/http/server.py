"""Runs the router's HTTP server: uvicorn inside the router's event loop, in the clear or in TLS.

Owns: the port, and handshakes of TLS. Never: what is answered, what one connection may cost (connection.py), or how
many there may be (connections.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from services.core.addresses import network_of
from services.core.listening import cannot_listen
from services.router.front.http.connection import BoundedConnection, Bounds, refusing
from services.router.front.http.connections import ConnectionLimits, Connections, ConnectionStage, default_limits
from services.rpc.certificates import Certificates

log = logging.getLogger(__name__)

_BACKLOG = 2048
# Longer than common clients and load balancers keep a connection in their pools, so that they are the ones to close it.
_KEEP_ALIVE_S = 75
_GRACE_S = 1
_ACCEPT_AGAIN_S = 1.0


class HttpServer:
    """Runs the HTTP server: call `start`, then `stop`, both on the event loop. `port` is the port that was bound."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        limits: ConnectionLimits | None = None,
        certificates: Certificates | None = None,
        around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    ) -> None:
        """`limits` are those of its connections; by default what the process's file descriptors allow. With
        `certificates` it speaks TLS alone, and asks for certificates if they have CAs. `around` wraps the app, and
        what answers the requests that are refused before they reach it."""
        self.port = port
        self.connections = Connections(limits or default_limits())
        self._host = host
        bounded = Bounds(around(app), around(refusing))
        self._server = _Embedded(_config(bounded, self.connections), self.connections, certificates)
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
        for connection in self.connections.each():
            connection.evict()


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
            return BoundedConnection(
                self._connections, self.config, self.server_state, self.lifespan.state, on_made=handshake.over
            )

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
