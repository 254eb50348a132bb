"""Runs the processes of `baton up`: which command each is, and in which order they start and stop.

Owns: the router before its workers when starting, the workers after the router when stopping (the router drains while
they still serve). Never: how a process is watched (supervisor.py), or how the machine is divided (plan.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence

from services.cli.child import Lifeline, Ready
from services.cli.model_cache import ResolvedModel
from services.cli.plan import CoreShare
from services.cli.readiness import local_address, wait_until_ready
from services.cli.supervisor import Supervised

# Seconds that a child gets beyond its own drain before it is killed.
_MARGIN_S = 5.0
# Workers serve this machine only: the router and each other.
WORKER_HOST = "127.0.0.1"
# So does the router's control port: workers and operators are on this machine.
CONTROL_HOST = "127.0.0.1"

# The program of a child; its role and flags follow.
PROGRAM = (sys.executable, "-m", "services.cli.main")


@dataclasses.dataclass(frozen=True)
class PlannedWorker:
    """Describes one worker as planned."""

    worker_id: str
    role: str
    metrics_port: int
    share: CoreShare
    device: str = "cpu"
    memory_utilization: float | None = None
    """Share of the device's memory for its weights and pool; None where its pool has a given size."""


@dataclasses.dataclass(frozen=True)
class ClusterPlan:
    """Describes everything that is decided before the first process starts."""

    model: ResolvedModel
    host: str
    port: int
    router_metrics_port: int
    workers: tuple[PlannedWorker, ...]
    # Flags that all workers get: --dtype, --transport, and the pool's size if it is given.
    worker_flags: tuple[str, ...]
    trace_file: str
    drain_s: float
    # Flags of the router: how it places requests.
    router_flags: tuple[str, ...] = ()
    # -1 means no HTTP.
    http_port: int = -1
    control_port: int = 0
    # Empty means the default place, where every process looks that is given no other.
    cluster_token_file: str = ""


class LocalCluster:
    """Runs a router and its workers. Make it and run it on one event loop. `announce` takes one line for people."""

    def __init__(
        self,
        plan: ClusterPlan,
        lifeline: Lifeline,
        announce: Callable[[str], None],
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._plan = plan
        self._program = program
        self._announce = announce
        self._port = plan.port
        self._http_port = plan.http_port
        self._control_port = plan.control_port
        self._router = Supervised("router", self._router_command, lifeline, announce, on_ready=self._router_ready)
        self._workers = [self._supervise(worker, lifeline) for worker in plan.workers]

    async def run(self, stopping: asyncio.Event) -> None:
        """Serves until `stopping`, then drains. Raises an ExceptionGroup of what could not be started.

        If it is cancelled, it kills every child at once.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._router.keep())
            bring_up = group.create_task(self._bring_up(group))
            await stopping.wait()
            bring_up.cancel()
            await self._router.stop(self._plan.drain_s + _MARGIN_S)
            await asyncio.gather(*(worker.stop(_MARGIN_S) for worker in self._workers))

    async def _bring_up(self, group: asyncio.TaskGroup) -> None:
        await self._router.ready_once.wait()  # its port is now known
        self._announce(f"{'loading':<12} {', '.join(worker.worker_id for worker in self._plan.workers)}")
        for worker in self._workers:
            group.create_task(worker.keep())
        for worker in self._workers:
            await worker.settled.wait()
        await wait_until_ready(local_address(self._plan.host, self._port))
        self._announce("ready")

    def _supervise(self, worker: PlannedWorker, lifeline: Lifeline) -> Supervised:
        return Supervised(
            worker.worker_id,
            lambda: self._worker_command(worker),
            lifeline,
            self._announce,
            on_ready=lambda ready: self._worker_ready(worker, ready),
        )

    def _router_command(self) -> list[str]:
        plan = self._plan
        flags = ["--host", plan.host, "--port", str(self._port), "--http-port", str(self._http_port)]
        flags += ["--metrics-port", str(plan.router_metrics_port)]
        flags += ["--control-host", CONTROL_HOST, "--control-port", str(self._control_port)]
        return self._command("router", [*flags, *plan.router_flags, "--drain-s", str(plan.drain_s)])

    def _worker_command(self, worker: PlannedWorker) -> list[str]:
        router = local_address(CONTROL_HOST, self._control_port)
        flags = ["--worker-id", worker.worker_id, "--host", WORKER_HOST, "--port", "0", "--router", router]
        flags += ["--metrics-port", str(worker.metrics_port)]
        return self._command(worker.role, [*flags, *worker_flags(worker), *self._plan.worker_flags])

    def _command(self, role: str, flags: list[str]) -> list[str]:
        plan = self._plan
        flags += ["--model", str(plan.model.path), "--served-model-name", plan.model.model_id]
        if plan.cluster_token_file:
            flags += ["--cluster-token-file", str(pathlib.Path(plan.cluster_token_file).absolute())]
        if plan.trace_file:
            flags += ["--trace-file", str(pathlib.Path(plan.trace_file).absolute())]
        return [*self._program, role, *flags]

    def _router_ready(self, ready: Ready) -> None:
        self._port, self._control_port = ready.port, ready.control_port  # a restarted router takes the same ports
        self._announce(line_of("router", self._plan.host, ready))
        control = local_address(CONTROL_HOST, ready.control_port)
        self._announce(f"{'control':<12} {control}  (baton status, baton drain)")
        if ready.http_port:
            self._http_port = ready.http_port
            self._announce(f"{'http':<12} http://{local_address(self._plan.host, ready.http_port)}/v1  (OpenAI-style)")

    def _worker_ready(self, worker: PlannedWorker, ready: Ready) -> None:
        cores = ",".join(map(str, worker.share.cores))
        where = f"cores {cores}" if worker.device == "cpu" else f"{worker.device}, cores {cores}"
        self._announce(line_of(worker.worker_id, WORKER_HOST, ready) + f"  {where}")


def worker_flags(worker: PlannedWorker) -> list[str]:
    """Returns the flags that give a worker its part of the machine."""
    flags = ["--threads", str(worker.share.threads), "--cores", ",".join(map(str, worker.share.cores))]
    if worker.share.own:
        flags += ["--own-cores"]
    flags += ["--device", worker.device]
    if worker.memory_utilization is not None:
        flags += ["--memory-utilization", f"{worker.memory_utilization:.5f}"]
    return flags


def line_of(name: str, host: str, ready: Ready) -> str:
    """Returns the line announced for a process that serves: its address, its metrics endpoint if any, and its pid."""
    address = local_address(host, ready.port) if ":" in host else f"{host}:{ready.port}"
    metrics = f"  metrics http://{local_address(host, ready.metrics_port)}/metrics" if ready.metrics_port else ""
    return f"{name:<12} {address:<21}{metrics}  pid {ready.pid}"
