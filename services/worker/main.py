"""Runs a worker process: configure, bind, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from baton.v1 import types_pb2
from services.core.lifecycle import Lifecycle
from services.core.start_progress import StartProgress, TellProgress
from services.engine.config import BLOCK_SIZE, EngineConfig
from services.engine.cpu.host_memory import keep_freed_memory
from services.engine.worker_engine import WorkerEngine
from services.rpc.logging import configure_logging
from services.rpc.telemetry import configure_tracing
from services.worker.address import completed
from services.worker.config import WorkerConfig
from services.worker.engine_choice import VLLM
from services.worker.host import WorkerHost
from services.worker.life import listen, run_host
from services.worker.loading import Announcement
from services.worker.machine import Machine
from services.worker.metrics import WorkerMetrics
from services.worker.phase import WorkerPhase, role_name

log = logging.getLogger(__name__)


async def serve(
    config: WorkerConfig,
    lifecycle: Lifecycle,
    phases: Mapping[types_pb2.WorkerRole, Callable[[WorkerHost], WorkerPhase]],
) -> None:
    """Runs a worker until it is told to stop. The keys of `phases` are its roles.

    The port, the process's health and its metrics answer while the weights load, and routers are told that they do
    (`loading.py`); the services are added when they are loaded.
    """
    name = role_name(phases)
    keep_freed_memory()  # called here, since it works best before gRPC starts threads
    token, certificates = config.token(), config.certificates()
    server = await listen(config, config.port, token, certificates)
    config = await completed(config, name, server.port)
    configure_logging(f"baton-{name}", config.worker_id, level=config.log_level, form=config.log_format)
    tracer = configure_tracing(f"baton-{name}", config.worker_id, config.trace_file or None)
    if config.dtype_reason:
        log.info("--dtype auto means %s: %s", config.dtype, config.dtype_reason)
    machine = Machine(token, certificates=certificates)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(tracer.shutdown)
        stack.push_async_callback(server.stop)  # for a second time, or because the host was never made
        metrics = stack.enter_context(contextlib.closing(WorkerMetrics(config, name)))
        engine = await _load(config, phases, machine, lifecycle)
        host = WorkerHost(config, phases, engine, server, tracer, machine)
        await run_host(host, lifecycle, metrics)


async def _load(
    config: WorkerConfig, roles: Collection[types_pb2.WorkerRole], machine: Machine, lifecycle: Lifecycle
) -> WorkerEngine:
    """Returns the loaded engine. Routers hear meanwhile that the worker is to come."""
    announcement = Announcement(config, roles, _model_id(config), machine.dial_router, machine.clock)

    def tell(progress: StartProgress) -> None:
        announcement.tell(progress)
        lifecycle.report_progress(progress)

    async with announcement:
        loading = asyncio.create_task(asyncio.to_thread(make_engine, config, roles, tell))
        stopping = asyncio.create_task(lifecycle.stopping.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        # The loading thread cannot be interrupted, and no request has been accepted yet. vLLM's processes end with this
        # one.
        log.info("told to stop while loading")
        os._exit(0)
    stopping.cancel()
    return loading.result()


def make_engine(config: WorkerConfig, roles: Collection[types_pb2.WorkerRole], tell: TellProgress) -> WorkerEngine:
    """Returns the engine that the configuration asks for, loaded and not started. It imports no other one. Raises
    BatonError if the model cannot be served so."""
    asked = engine_config(config, roles)
    if config.engine == VLLM:
        from services.vllm.engine import vllm_engine

        python = Path(config.vllm_python)
        engine: WorkerEngine = vllm_engine(asked, python=python, engine_args=config.engine_arguments(), tell=tell)
        return engine
    from services.engine.loading import torch_engine  # torch and transformers, which take seconds

    return torch_engine(asked, tell)


def _model_id(config: WorkerConfig) -> str:
    return config.served_model_name or config.model.rstrip("/").rpartition("/")[2]


def engine_config(config: WorkerConfig, roles: Collection[types_pb2.WorkerRole]) -> EngineConfig:
    return EngineConfig(
        model_path=config.model,
        model_id=_model_id(config),
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        quantization=config.quantization,
        block_size=config.block_size or (0 if config.engine == VLLM else BLOCK_SIZE),
        num_blocks=config.kv_blocks or None,
        memory_utilization=config.memory_utilization or None,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len or None,
        max_num_batched_tokens=config.max_num_batched_tokens,
        decode_graphs=config.decode_graphs,
        threads=config.threads or None,
        limit_leased_blocks=len(roles) > 1,  # so that leases leave room for decodes
    )
