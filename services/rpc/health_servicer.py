"""Serves grpc.health.v1 to anyone, also to those who ask for what is not there.

Owns: the bounds on what may be asked. Never: the states, which the library's servicer keeps, or when one changes.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2

from services.core.errors import InvalidRequest
from services.rpc.interceptors import CallContext

MAX_NAME_CHARS = 256
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
    if len(request.service) > MAX_NAME_CHARS:
        raise InvalidRequest("service", f"is longer than {MAX_NAME_CHARS} characters")
