"""Runs the gRPC server of a process: options, errors, health, reflection, graceful stop.

Owns: the listening port and the health states. Never: servicers' work, signals, or when a service is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.core.addresses import join
from services.core.errors import ConfigError, InvalidRequest
from services.core.listening import require_free
from services.rpc.authentication import AccessInterceptor
from services.rpc.call_limits import CallInterceptor, most_arriving, most_held
from services.rpc.certificates import Certificates
from services.rpc.interceptors import CallContext, ErrorInterceptor
from services.rpc.options import MAX_CALLS, MAX_REQUEST_BYTES, max_connections, server_options

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


_MAX_NAME_CHARS = 256
"""The longest name of a service that may be asked for. A watched name is kept as long as it is watched."""


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # the package has no types
    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: CallContext
    ) -> health_pb2.HealthCheckResponse:
        """Returns the state of a service; NOT_FOUND for one that is unknown.

        The library's own method ends such a call by `abort`: an exception that keeps the request in memory until Python
        collects its cycles, and whoever asks may repeat that.
        """
        _check_name(request)
        status = self._server_status.get(request.service)
        if status is None:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details("there is no such service")
            return health_pb2.HealthCheckResponse()
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: CallContext) -> None:
        """Writes the state of a service, and each that follows, until the client goes away."""
        _check_name(request)
        await super().Watch(request, context)


def _check_name(request: health_pb2.HealthCheckRequest) -> None:
    if len(request.service) > _MAX_NAME_CHARS:
        raise InvalidRequest("service", f"is longer than {_MAX_NAME_CHARS} characters")


class GrpcServer:
    """Runs the gRPC server of a process: `add` services, `bind` (or let `start` do it), `start`, `set_ready`, `stop`.

    The health of "" is SERVING as soon as the server has started (the process is alive); each service is NOT_SERVING
    until `set_ready` changes it. Make it on the event loop that it will serve on.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        flag: str = "--port",
        token: str | None = None,
        certificates: Certificates | None = None,
        by_role: bool = False,
        reflects: bool = False,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        guards: Sequence[grpc.aio.ServerInterceptor] = (),
        max_concurrent_rpcs: int = MAX_CALLS,
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        """`flag` is the one that gives the port, for messages.

        `token` is the cluster token, and `by_role` says that callers' certificates must name their roles; without
        either only open services can be called (`authentication.py`). With `certificates` the port speaks TLS alone,
        and asks for certificates if they have CAs.

        With `reflects`, the server describes its services and their messages to anyone who asks. `interceptors` run
        closer to the servicers than the interceptor that translates errors, and `guards` before it: they end calls
        with a status. `freed` is called when much memory is
        about to be freed.
        """
        self.host = host
        self._port = port
        self._flag = flag
        self._bound = False
        assert certificates is not None or not by_role, "roles stand in certificates"
        self._certificates = certificates
        self._reflects = reflects
        self._services: list[str] = []
        self._health = HealthServicer()
        # The runtime's own limit counts calls whose clients never read their answers, and cannot end them.
        held = most_held(max_connections())
        limits = CallInterceptor(max_concurrent_rpcs, most_arriving(max_request_bytes), held, freed)
        access = AccessInterceptor(token, by_role=by_role)
        self._server = grpc.aio.server(
            # Errors are translated outside all but the guards.
            interceptors=[*guards, ErrorInterceptor(), access, limits, *interceptors],
            options=server_options(max_request_bytes, max_concurrent_rpcs),
        )

    def add(self, service: str, register: Callable[[Any, Any], None], servicer: object) -> None:
        """Adds a servicer under its full name: `add("baton.v1.X", x_pb2_grpc.add_XServicer_to_server, servicer)`."""
        register(servicer, _LateRegistration(self._server))
        self.promise(service)

    def promise(self, *services: str) -> None:
        """Names, before `start`, services that are added after it: health reports them, but calls fail until then."""
        self._services += [service for service in services if service not in self._services]

    @property
    def port(self) -> int:
        assert self._bound, "the port is known after bind"
        return self._port

    @property
    def address(self) -> str:
        """Returns `host:port` as bound. The host may be a wildcard; the service decides what to advertise."""
        return join(self.host, self.port)

    def bind(self) -> int:
        """Binds the port (0: a free one) and returns it.

        Raises ConfigError if it is taken or the host is not this machine's.
        """
        if not self._bound:
            address = join(self.host, self._port)
            try:
                if self._certificates is None:
                    bound = self._server.add_insecure_port(address)
                else:
                    bound = self._server.add_secure_port(address, self._certificates.server_credentials())
            except RuntimeError as error:
                require_free(self._flag, self.host, self._port)  # the runtime does not say why
                raise ConfigError(f"{self._flag}: cannot listen on {address}") from error
            self._port, self._bound = bound, True
        return self._port

    async def start(self) -> None:
        self.bind()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self.set_ready(False)
        if self._reflects:
            names = [*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._server)
        await self._server.start()

    async def set_ready(self, ready: bool, *services: str) -> None:
        """Sets the health of the named services, or of all. Has no effect once `stop` has begun."""
        for service in services or self._services:
            await self._health.set(service, _SERVING if ready else _NOT_SERVING)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stops the server and frees its port: NOT_SERVING at once, RPCs under way cancelled after `grace_s`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self._server.wait_for_termination()


class _LateRegistration:
    """Passes generated registration code a server that accepts services after its start too.

    That code's second call is a shortcut of the synchronous server. The aio server ignores it, but logs a warning once
    it has started; here it does nothing.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        pass
