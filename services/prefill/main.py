"""`baton prefill`: a worker with the prefill phase."""

from __future__ import annotations

from baton.v1 import types_pb2
from services.core.lifecycle import Lifecycle
from services.prefill.servicer import PrefillServicer
from services.worker.config import WorkerConfig
from services.worker.main import serve as serve_worker


async def serve(config: WorkerConfig, lifecycle: Lifecycle) -> None:
    """Runs until told to stop."""
    await serve_worker(config, types_pb2.WORKER_ROLE_PREFILL, lifecycle, [PrefillServicer])
