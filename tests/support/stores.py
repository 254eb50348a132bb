"""Runs stores in this process, on port 0, and writes the commands that a router would send them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from opentelemetry.sdk.trace import TracerProvider

from baton.v1 import worker_pb2
from services.rpc.serving import GrpcServer
from services.rpc.telemetry import Tracer
from services.store.config import StoreConfig
from services.store.main import new_engine, store_host
from services.worker.host import WorkerHost
from services.worker.machine import Machine
from tests.support.trusted import CLUSTER_TOKEN
from tests.support.workers import PROMPT, idle


@contextlib.asynccontextmanager
async def running_store(
    worker: WorkerHost, num_blocks: int = 64, tracer: Tracer | None = None, **config: Any
) -> AsyncIterator[WorkerHost]:
    """Yields a store with room for that many blocks of the worker's layout; asserts that it is idle in the end."""
    server = GrpcServer("127.0.0.1", 0, token=CLUSTER_TOKEN)
    await server.start()
    engine = new_engine(worker.describe(), num_blocks * worker.layout.block_bytes)
    tracer = tracer or Tracer(TracerProvider(shutdown_on_exit=False))
    host = store_host(StoreConfig(**config), engine, server, tracer, Machine(CLUSTER_TOKEN))
    await host.start()
    try:
        yield host
        await idle(host)
    finally:
        await host.stop()


def park_command(leg: int, started: Any, num_tokens: int = len(PROMPT), **more: Any) -> worker_pb2.ParkCommand:
    """Returns the command to park the handoff of a prefill leg, by its `PrefillStarted`."""
    handoff = worker_pb2.Handoff(lease_id=started.lease_id, source=started.source)
    return worker_pb2.ParkCommand(leg=leg, request_id="r", handoff=handoff, num_tokens=num_tokens, **more)
