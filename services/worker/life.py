"""Listens for a host, and runs it once it has been put together: starts it, reports that it is ready, waits for its
end, and stops it.

Owns: what its port asks of callers, and when the process of a worker, or of a store, ends. Never: how the host was
made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from services.core.errors import WorkerFailed
from services.core.garbage import collect_rarely
from services.core.lifecycle import Lifecycle
from services.kvtransfer.endpoint import TRANSFER_SERVICE
from services.rpc.certificates import Certificates
from services.rpc.serving import GrpcServer
from services.worker.activity import activity_log
from services.worker.config import PeerConfig
from services.worker.host import WorkerHost
from services.worker.metrics import WorkerMetrics
from services.worker.session import WORKER_SERVICE


async def listen(config: PeerConfig, port: int, token: str | None, certificates: Certificates | None) -> GrpcServer:
    """Returns a server that answers on the port, with health alone at first."""
    server = GrpcServer(
        config.host,
        port,
        token=token,
        certificates=certificates,
        by_role=config.by_role,
        max_request_bytes=config.max_message_bytes,
    )
    server.promise(TRANSFER_SERVICE, WORKER_SERVICE)
    await server.start()
    return server


async def run_host(
    host: WorkerHost,
    lifecycle: Lifecycle,
    metrics: WorkerMetrics,
    *,
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Runs the host until it was told to leave and has drained. `metrics` shows it; `beside` runs as long as it does.

    Raises WorkerFailed when the host's engine has ended.
    """
    try:
        metrics.watch(host)
        await host.start()
        if host.config.log_interval_s:
            host.spawn(activity_log(host).run(), "activity log")
        if host.machine.certificates is not None:
            host.spawn(host.machine.certificates.watch(), "certificates")
        if beside is not None:
            host.spawn(beside(), "beside the host")
        collect_rarely()
        lifecycle.report_ready(port=host.server.port, metrics_port=metrics.port)
        await _live(host, lifecycle)
    finally:
        await host.stop()


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
