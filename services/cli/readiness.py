"""Asks a router whether a request would succeed now."""

from __future__ import annotations

import asyncio
import logging

import grpc

from baton.v1 import control_pb2, control_pb2_grpc
from services.rpc.channels import dial

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.05
_CALL_TIMEOUT_S = 2.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1", "[::]": "::1"}


def local_address(host: str, port: int) -> str:
    """`host:port` as a process on this machine dials what was bound to `host`."""
    host = _WILDCARDS.get(host, host)
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


async def wait_until_ready(address: str) -> None:
    """Returns when the router at `address` says that it would place a request."""
    async with dial(address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        while True:
            try:
                status = await stub.GetStatus(control_pb2.GetStatusRequest(), timeout=_CALL_TIMEOUT_S)
                if status.ready:
                    return
            except grpc.aio.AioRpcError as error:
                logger.debug("router %s: %s", address, error.details())  # it may be on its way back; ask again
            await asyncio.sleep(_INTERVAL_S)
