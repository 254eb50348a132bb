"""Runs `baton prefill`: a worker with the prefill phase."""

from __future__ import annotations

from baton.v1 import types_pb2
from services.core.lifecycle import Lifecycle
from services.prefill.leg import PrefillPhase
from services.worker.config import WorkerConfig
from services.worker.main import serve as serve_worker


async def serve(config: WorkerConfig, lifecycle: Lifecycle) -> None:
    """Runs the worker until it is told to stop."""
    await serve_worker(config, lifecycle, {types_pb2.WORKER_ROLE_PREFILL: PrefillPhase})
