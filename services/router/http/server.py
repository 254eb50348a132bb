"""uvicorn inside a loop that is already running: its port, its limits, its end.

Owns: the listening socket and the connections. Never: signals, logging or the loop, which are the process's; or what
is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket

import uvicorn
from starlette.types import ASGIApp

from services.core.errors import ConfigError

_BACKLOG = 2048
_MAX_HEADER_BYTES = 64 << 10
# Longer than the pools of common clients and load balancers keep a connection, so that they are the ones to close it.
_KEEP_ALIVE_S = 75
_GRACE_S = 1
# Of the process's file descriptors. The rest is for gRPC, workers and files.
_SHARE_OF_DESCRIPTORS = 0.75


class HttpServer:
    """`start`, then `stop`; both on the event loop. `port` is the one bound."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self.port = port
        self._host = host
        self._server = _Embedded(_config(app))
        self._serving: asyncio.Task[None] | None = None

    @property
    def serving(self) -> asyncio.Task[None]:
        """Ends only with `stop`, or by a defect."""
        assert self._serving is not None, "not started"
        return self._serving

    async def start(self) -> None:
        """Listens. ConfigError if the port is taken or the host is not ours."""
        listener = _listen(self._host, self.port)
        self.port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        await self._server.listening.wait()

    async def stop(self) -> None:
        """Stops listening, gives answers under way a moment to be sent, and closes what is left."""
        if self._serving is None:
            return
        self._server.should_exit = True
        await self._serving
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


class _Embedded(uvicorn.Server):
    """Leaves the process's signals alone and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


def _config(app: ASGIApp) -> uvicorn.Config:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return uvicorn.Config(
        app,
        http="h11",  # bounds what a header may take
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        limit_concurrency=max(1, int(descriptors * _SHARE_OF_DESCRIPTORS)),
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=kind, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"--http-port: cannot listen on {host}:{port}: {error.strerror}") from error
