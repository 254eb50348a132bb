"""Asks a router whether a request would succeed now."""

from __future__ import annotations

import asyncio
import logging

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.core.addresses import join
from services.rpc.authentication import ROUTER
from services.rpc.certificates import Certificates
from services.rpc.channels import dial

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.05
_CALL_TIMEOUT_S = 2.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1", "[::]": "::1"}


def local_address(host: str, port: int) -> str:
    """Returns the `host:port` at which a process on this machine dials what was bound to `host`."""
    return join(_WILDCARDS.get(host, host), port)


async def wait_until_ready(address: str, certificates: Certificates | None = None) -> None:
    """Returns when the router with the control port at `address` reports that it would place a request."""
    request = health_pb2.HealthCheckRequest(service="baton.v1.InferenceService")
    async with dial(address, None, certificates, role=ROUTER) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                answer = await stub.Check(request, timeout=_CALL_TIMEOUT_S)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError as error:
                logger.debug("router %s: %s", address, error.details())  # it may be restarting; ask again
            await asyncio.sleep(_INTERVAL_S)
