"""Runs a worker process: configure, bind, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping

from baton.v1 import types_pb2
from services.core.cluster_token import cluster_token
from services.core.errors import WorkerFailed
from services.core.lifecycle import Lifecycle
from services.engine.config import EngineConfig
from services.engine.cpu.host_memory import keep_freed_memory
from services.engine.loading import torch_engine
from services.engine.worker_engine import WorkerEngine
from services.rpc.logging import configure_logging
from services.rpc.serving import GrpcServer
from services.rpc.telemetry import configure_tracing
from services.worker.activity import activity_log
from services.worker.address import completed
from services.worker.config import WorkerConfig
from services.worker.host import WorkerHost
from services.worker.machine import Machine
from services.worker.metrics import WorkerMetrics
from services.worker.phase import WorkerPhase, role_name
from services.worker.session import WORKER_SERVICE
from services.worker.transfer import TRANSFER_SERVICE

log = logging.getLogger(__name__)


async def serve(
    config: WorkerConfig,
    lifecycle: Lifecycle,
    phases: Mapping[types_pb2.WorkerRole, Callable[[WorkerHost], WorkerPhase]],
) -> None:
    """Runs a worker until it is told to stop. The keys of `phases` are its roles.

    The port and the process's health answer while the weights load; the services are added when they are loaded.
    """
    name = role_name(phases)
    keep_freed_memory()  # called here, since it works best before gRPC starts threads
    token = cluster_token(config.cluster_token_file)
    server = GrpcServer(config.host, config.port, token=token, max_request_bytes=config.max_message_bytes)
    server.promise(TRANSFER_SERVICE, WORKER_SERVICE)
    await server.start()
    config = await completed(config, name, server.port)
    configure_logging(f"baton-{name}", config.worker_id, level=config.log_level, form=config.log_format)
    tracer = configure_tracing(f"baton-{name}", config.worker_id, config.trace_file or None)
    if config.dtype_reason:
        log.info("--dtype auto means %s: %s", config.dtype, config.dtype_reason)
    try:
        engine = await _load(engine_config(config, phases), lifecycle)
        host = WorkerHost(config, phases, engine, server, tracer, Machine(token))
        metrics = WorkerMetrics(host)
        try:
            await host.start()
            if config.log_interval_s:
                host.spawn(activity_log(host).run(), "activity log")
            lifecycle.report_ready(port=server.port, metrics_port=metrics.port)
            await _live(host, lifecycle)
        finally:
            await host.stop()
            metrics.close()
    finally:
        await server.stop()  # for a second time, or because the host was never made
        tracer.shutdown()


async def _live(host: WorkerHost, lifecycle: Lifecycle) -> None:
    """Waits until the worker was told to leave, by a signal or by a router, and has drained.

    Raises WorkerFailed when the step thread has ended: a worker that cannot compute must not stay; its supervisor
    starts another.
    """

    async def leave_on_signal() -> None:
        await lifecycle.stopping.wait()
        host.leave(lifecycle.drain_s, "told to stop")

    signals = asyncio.create_task(leave_on_signal(), name="signals")
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
        steps.cancel()  # the thread that it waits in ends with the engine


async def _load(config: EngineConfig, lifecycle: Lifecycle) -> WorkerEngine:
    loading = asyncio.create_task(asyncio.to_thread(torch_engine, config))
    stopping = asyncio.create_task(lifecycle.stopping.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        # The loading thread cannot be interrupted, and no request has been accepted yet.
        log.info("told to stop while loading")
        os._exit(0)
    stopping.cancel()
    return loading.result()


def engine_config(config: WorkerConfig, roles: Collection[types_pb2.WorkerRole]) -> EngineConfig:
    return EngineConfig(
        model_path=config.model,
        model_id=config.served_model_name or config.model.rstrip("/").rpartition("/")[2],
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        quantization=config.quantization,
        block_size=config.block_size,
        num_blocks=config.kv_blocks or None,
        memory_utilization=config.memory_utilization or None,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len or None,
        max_num_batched_tokens=config.max_num_batched_tokens,
        decode_graphs=config.decode_graphs,
        threads=config.threads or None,
        limit_leased_blocks=len(roles) > 1,  # so that leases leave room for decodes
    )
