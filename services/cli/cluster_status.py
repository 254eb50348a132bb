"""Asks a router what it thinks of its workers, for a screen that is drawn several times a second."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from baton.v1 import control_pb2, control_pb2_grpc
from services.rpc.authentication import ROUTER
from services.rpc.certificates import Certificates
from services.rpc.channels import dial

logger = logging.getLogger(__name__)

_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class ClusterStatus:
    workers: Mapping[str, tuple[int, str]]
    """State (`control_pb2.WorkerState`) and reason of each worker by its id."""
    num_requests: int
    num_pairs: int
    num_proven: int
    """Pairs between which a canary's KV has been handed over."""
    router_pid: int = 0
    port: int = 0
    """The port of the router's gRPC API."""
    http_port: int = 0


async def read_status(
    address: str, token: str | None, certificates: Certificates | None = None
) -> ClusterStatus | None:
    """Returns the state as the router at this control port sees it; None if it does not answer at once."""
    async with dial(address, token, certificates, role=ROUTER) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        try:
            status = await stub.GetStatus(control_pb2.GetStatusRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            logger.debug("router %s: %s", address, error.details())  # it may be restarting, or has ended
            return None
    return ClusterStatus(
        {each.worker.worker_id: (each.state, each.reason) for each in status.workers},
        status.num_queued + status.num_prefilling + status.num_parked + status.num_decoding,
        len(status.pairs),
        sum(pair.state == control_pb2.PAIR_STATE_PROVEN for pair in status.pairs),
        status.router_pid,
        status.port,
        status.http_port,
    )
