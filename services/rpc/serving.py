"""A gRPC server as every process of Baton runs it: options, errors, health, reflection, graceful stop.

Owns: the listening port and the health states. Never: servicers' work, signals, or when a service is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.core.errors import ConfigError
from services.rpc.interceptors import ErrorInterceptor
from services.rpc.options import MAX_REQUEST_BYTES, server_options

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class GrpcServer:
    """`add` services, `bind` (or let `start` do it), `start`, `set_ready`, `stop`.

    Health: "" is SERVING as soon as the server has started (the process is alive); each service is NOT_SERVING until
    `set_ready` says otherwise. Must be made on the event loop that it will serve on.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, max_request_bytes: int = MAX_REQUEST_BYTES) -> None:
        self.host = host
        self._port = port
        self._bound = False
        self._services: list[str] = []
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=server_options(max_request_bytes))

    def add(self, service: str, register: Callable[[Any, Any], None], servicer: object) -> None:
        """Adds a servicer under its full name: `add("baton.v1.X", x_pb2_grpc.add_XServicer_to_server, servicer)`."""
        register(servicer, _AnyTime(self._server))
        self.promise(service)

    def promise(self, *services: str) -> None:
        """Names services before `start` that are added after it: health and reflection know them, calls do not yet."""
        self._services += [service for service in services if service not in self._services]

    @property
    def port(self) -> int:
        assert self._bound, "the port is known after bind"
        return self._port

    @property
    def address(self) -> str:
        """`host:port` as bound. The host may be a wildcard; what to advertise is the service's decision."""
        return _join(self.host, self.port)

    def bind(self) -> int:
        """Takes the port (0: a free one) and returns it. ConfigError if it is taken or the host is not ours."""
        if not self._bound:
            address = _join(self.host, self._port)
            try:
                bound = self._server.add_insecure_port(address)
            except RuntimeError as error:
                raise ConfigError(f"cannot listen on {address}: the port is in use or the host is not here") from error
            self._port, self._bound = bound, True
        return self._port

    async def start(self) -> None:
        self.bind()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self.set_ready(False)
        reflection.enable_server_reflection(
            [*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )
        await self._server.start()

    async def set_ready(self, ready: bool, *services: str) -> None:
        """Sets the health of the named services, or of all. No effect once `stop` has begun."""
        for service in services or self._services:
            await self._health.set(service, _SERVING if ready else _NOT_SERVING)

    async def stop(self, grace_s: float = 0.0) -> None:
        """NOT_SERVING at once, new RPCs refused, RPCs under way cancelled after the grace, port given back."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self._server.wait_for_termination()


class _AnyTime:
    """A server to generated registration code. Its second call is a shortcut of the synchronous server, which the aio
    server ignores, but with a warning when it has started."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        pass


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
