"""Runs the router's HTTP server: uvicorn inside the router's event loop, in the clear or in TLS.

Owns: the port. Never: what is answered, what connections may cost, or how many there may be (connection.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from services.core.listening import cannot_listen
from services.router.front.http.connection import (
    BoundedConnection,
    Bounds,
    ConnectionLimits,
    Connections,
    default_limits,
)
from services.rpc.certificates import Certificates

_BACKLOG = 2048
_GRACE_S = 1


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
        connect: Any = functools.partial(BoundedConnection, self.connections, certificates)
        self._server = _Embedded(_config(Bounds(app, around, self.connections), connect, self.connections.limits))
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


class _Embedded(uvicorn.Server):
    """Runs a uvicorn server that leaves the process's signals alone."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def _config(app: ASGIApp, connect: Any, limits: ConnectionLimits) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=connect,  # uvicorn calls it like a class
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # clients are told of their errors in the response
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=int(limits.keep_s) + 1,  # connections are closed here before
        timeout_graceful_shutdown=_GRACE_S,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=kind, backlog=_BACKLOG)
    except OSError as error:
        raise cannot_listen("--http-port", host, port, error) from error
