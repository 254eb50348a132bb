"""Runs `baton kvtransfer`: learn what is to be kept, serve, drain, stop, and again for another layout.

Owns: the order of these, and how a store is put together. Never: torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Coroutine
from typing import TypeVar

from baton.v1 import control_pb2, types_pb2
from services.core.errors import ConfigError
from services.core.lifecycle import Lifecycle
from services.core.sizes import parse_size
from services.core.start_progress import StartProgress
from services.engine.config import EngineInfo
from services.kv.layout import Layout
from services.kvtransfer.transports.staging import StagingArea
from services.kvtransfer.wire import layout_from_proto
from services.rpc.logging import configure_logging
from services.rpc.serving import GrpcServer
from services.rpc.telemetry import Tracer, configure_tracing
from services.store.config import StoreConfig
from services.store.engine import StoreEngine
from services.store.learning import Teachers, learn, outlived
from services.store.leg import StorePhase
from services.worker.address import completed
from services.worker.host import WorkerHost
from services.worker.life import listen, run_host
from services.worker.machine import Machine
from services.worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

T = TypeVar("T")
_FEWEST_BLOCKS = 16
"""Fewer are of no use, and show that the number of bytes is a mistake."""
_RELEARN_S = 10.0
"""Time for which a store keeps what no worker left can use while there are others of the model, for whose KV it then
empties itself."""


async def serve(config: StoreConfig, lifecycle: Lifecycle) -> None:
    """Runs the store until it is told to stop, or to leave. Its memory is for one layout at a time."""
    if not config.router:
        raise ConfigError("--router: a store keeps KV for workers, of which it learns from a router")
    token, certificates = config.token(), config.certificates()
    machine = Machine(token, certificates=certificates)
    server = await listen(config, config.port, token, certificates)
    config = await completed(config, "store", server.port)
    configure_logging("baton-store", config.worker_id, level=config.log_level, form=config.log_format)
    tracer = configure_tracing("baton-store", config.worker_id, config.trace_file or None)
    teachers = Teachers(config.router, machine.dial_router)
    try:
        while await _serve_layout(config, lifecycle, server, tracer, teachers, machine):
            log.info("%s empties itself: the workers that could use what it keeps are gone", config.worker_id)
            server = await listen(config, server.port, token, certificates)
    finally:
        await teachers.close()
        await server.stop()
        tracer.shutdown()


async def _serve_layout(
    config: StoreConfig,
    lifecycle: Lifecycle,
    server: GrpcServer,
    tracer: Tracer,
    teachers: Teachers,
    machine: Machine,
) -> bool:
    """Keeps the KV of one layout. Returns whether the store goes on with another."""
    lifecycle.report_progress(StartProgress("wait", "workers"))
    worker = await _unless_stopped(learn(teachers, config.served_model_name), lifecycle)
    if worker is None:
        return False
    engine = new_engine(worker, parse_size(config.kvtransfer_bytes))
    host = store_host(config, engine, server, tracer, machine)
    is_outlived = False

    async def leave_when_outlived() -> None:
        nonlocal is_outlived
        await outlived(teachers, host.layout, worker.layout.model_id, after_s=_RELEARN_S, clock=machine.awake)
        is_outlived = True
        host.leave(0.0, "no worker is left that could use what it keeps")

    with contextlib.closing(WorkerMetrics(config, "store")) as metrics:
        await run_host(host, lifecycle, metrics, beside=leave_when_outlived)
    return is_outlived and not lifecycle.stopping.is_set()


def store_host(
    config: StoreConfig, engine: StoreEngine, server: GrpcServer, tracer: Tracer, machine: Machine
) -> WorkerHost:
    """Returns the host of a store. Call it on the event loop."""
    phases = {types_pb2.WORKER_ROLE_STORE: lambda host: StorePhase(host, engine)}
    return WorkerHost(config, phases, engine, server, tracer, machine)


def new_engine(worker: control_pb2.WorkerDescription, num_bytes: int) -> StoreEngine:
    """Returns an engine with memory for blocks of the worker's layout. Raises ConfigError if it would be too few."""
    info = info_of(worker, num_bytes)
    memory = StagingArea(info.num_blocks, layout_from_proto(worker.layout).block_bytes)
    return StoreEngine(info, memory)


def info_of(worker: control_pb2.WorkerDescription, num_bytes: int) -> EngineInfo:
    """Returns what the store says of itself: what the worker computes, with as many blocks as the bytes hold."""
    layout: Layout = layout_from_proto(worker.layout)
    num_blocks = min(num_bytes // layout.block_bytes, (1 << 30) - 1)
    if num_blocks < _FEWEST_BLOCKS:
        raise ConfigError(
            f"--kvtransfer-bytes: {num_bytes} hold {num_blocks} blocks of model {layout.model_id!r}, which have "
            f"{layout.block_bytes} bytes each; at least {_FEWEST_BLOCKS} are needed"
        )
    fields = {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
    del fields["layout_version"]
    return EngineInfo(
        **fields,
        numerics=worker.fingerprint.numerics,
        num_blocks=num_blocks,
        max_model_len=min(worker.max_model_len, num_blocks * layout.block_size),
        vocab_size=worker.vocab_size,
        eos_token_ids=(),
        device="cpu",
        kernels="keeps KV in host memory",
    )


async def _unless_stopped(work: Coroutine[object, object, T], lifecycle: Lifecycle) -> T | None:
    """Returns what the work returns, or None if the process is told to stop before."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(lifecycle.stopping.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, stopping):
            each.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)
