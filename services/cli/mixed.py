"""`baton mixed`: a worker with both phases over one engine and one pool.

It stands here because prefill and decode do not know each other.
"""

from __future__ import annotations

from baton.v1 import types_pb2
from services.core.lifecycle import Lifecycle
from services.decode.servicer import DecodeServicer
from services.prefill.servicer import PrefillServicer
from services.worker.config import WorkerConfig
from services.worker.main import serve as serve_worker


async def serve(config: WorkerConfig, lifecycle: Lifecycle) -> None:
    """Runs until told to stop."""
    role = types_pb2.WORKER_ROLE_MIXED
    await serve_worker(config, role, lifecycle, [PrefillServicer, DecodeServicer])
