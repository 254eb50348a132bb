"""`baton decode`: a worker with the decode phase."""

from __future__ import annotations

from baton.v1 import types_pb2
from services.core.lifecycle import Lifecycle
from services.decode.servicer import DecodeServicer
from services.worker.config import WorkerConfig
from services.worker.main import serve as serve_worker


async def serve(config: WorkerConfig, lifecycle: Lifecycle) -> None:
    """Runs until told to stop."""
    await serve_worker(config, types_pb2.WORKER_ROLE_DECODE, lifecycle, [DecodeServicer])
