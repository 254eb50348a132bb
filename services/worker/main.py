"""Runs a worker process: configure, bind, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

from baton.v1 import types_pb2
from services.core.errors import WorkerFailed
from services.core.ids import new_incarnation
from services.core.lifecycle import Lifecycle
from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.host_memory import keep_freed_memory
from services.rpc.logging import configure_logging
from services.rpc.serving import GrpcServer
from services.rpc.telemetry import configure_tracing
from services.worker.address import completed
from services.worker.config import WorkerConfig
from services.worker.host import TRANSFER_SERVICE, Phase, WorkerHost, role_name
from services.worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)


async def serve(
    config: WorkerConfig,
    role: types_pb2.WorkerRole,
    lifecycle: Lifecycle,
    phases: Sequence[type[Phase]],
) -> None:
    """Runs until told to stop. Port and health answer while the weights load; services come when they are there."""
    keep_freed_memory()  # here, since it works best before gRPC starts threads
    server = GrpcServer(config.host, config.port, max_request_bytes=config.max_message_bytes)
    server.promise(TRANSFER_SERVICE, *(phase.full_name for phase in phases))
    await server.start()
    config = await completed(config, role_name(role), server.port)
    configure_logging(f"baton-{role_name(role)}", config.worker_id, level=config.log_level, form=config.log_format)
    tracer = configure_tracing(f"baton-{role_name(role)}", config.worker_id, config.trace_file or None)
    try:
        engine = await _load(engine_config(config, role), lifecycle)
        host = WorkerHost(config, role, engine, server, tracer, new_incarnation())
        metrics = WorkerMetrics(host)
        try:
            await host.start([phase(host) for phase in phases])
            lifecycle.report_ready(port=server.port, metrics_port=metrics.port)
            await _live(host, lifecycle)
        finally:
            await host.stop()
            metrics.close()
    finally:
        await server.stop()  # again, or because the host was never made
        tracer.shutdown()


async def _live(host: WorkerHost, lifecycle: Lifecycle) -> None:
    """Returns when the worker was told to leave, by a signal or by a router, and has drained. Raises WorkerFailed when
    its step thread has ended: a worker that cannot compute must not linger; its supervisor starts another."""

    async def heed_signals() -> None:
        await lifecycle.stopping.wait()
        host.leave(lifecycle.drain_s, "told to stop")

    signals = asyncio.create_task(heed_signals(), name="signals")
    life = asyncio.create_task(host.left(), name="life")
    steps = asyncio.create_task(asyncio.to_thread(host.engine.join), name="step thread")
    try:
        await asyncio.wait({life, steps}, return_when=asyncio.FIRST_COMPLETED)
        if not life.done():
            error = WorkerFailed("the step thread has ended; the log says why")
            host.fail(error)
            raise error
        life.result()
    finally:
        life.cancel()
        signals.cancel()
        steps.cancel()  # the thread it waits in ends with the engine


async def _load(config: EngineConfig, lifecycle: Lifecycle) -> Engine:
    loading = asyncio.create_task(asyncio.to_thread(Engine, config))
    stopping = asyncio.create_task(lifecycle.stopping.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        # The thread that loads cannot be interrupted, and nobody has been promised anything yet.
        log.info("told to stop while loading")
        os._exit(0)
    stopping.cancel()
    return loading.result()


def engine_config(config: WorkerConfig, role: types_pb2.WorkerRole) -> EngineConfig:
    return EngineConfig(
        model_path=config.model,
        model_id=config.served_model_name or config.model.rstrip("/").rpartition("/")[2],
        device=config.device,
        dtype=config.dtype,
        block_size=config.block_size,
        num_blocks=config.kv_blocks or None,
        memory_utilization=config.memory_utilization or None,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len or None,
        max_num_batched_tokens=config.max_num_batched_tokens,
        threads=config.threads or None,
        limit_leased_blocks=role == types_pb2.WORKER_ROLE_MIXED,
    )
