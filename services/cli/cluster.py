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
from functools import partial

from services.cli.child import Lifeline, Ready
from services.cli.cluster_output import ClusterOutput
from services.cli.model_cache import ResolvedModel
from services.cli.plan import CoreShare
from services.cli.readiness import local_address, wait_until_ready
from services.cli.supervisor import Supervised
from services.rpc.certificates import Certificates

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
class PlannedStore:
    """Describes one store as planned."""

    worker_id: str
    metrics_port: int


@dataclasses.dataclass(frozen=True)
class ClusterPlan:
    """Describes everything that is decided before the first process starts."""

    model: ResolvedModel
    host: str
    port: int
    router_metrics_port: int
    workers: tuple[PlannedWorker, ...]
    drain_s: float
    # Flags that all processes of a kind get.
    worker_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    stores: tuple[PlannedStore, ...] = ()
    store_flags: tuple[str, ...] = ()
    # -1 means no HTTP.
    http_port: int = -1
    control_port: int = 0
    # A folder as `baton certs dev` makes it; empty means no TLS within the cluster.
    tls_dir: str = ""
    # With which the router is asked for its health.
    certificates: Certificates | None = None
    # Whether clients speak TLS to the router.
    has_public_tls: bool = False


class LocalCluster:
    """Runs a router and its workers. Make it and run it on one event loop."""

    def __init__(
        self,
        plan: ClusterPlan,
        lifeline: Lifeline,
        output: ClusterOutput,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._plan = plan
        self._program = program
        self._output = output
        self._port = plan.port
        self._http_port = plan.http_port
        self._control_port = plan.control_port
        self._router = self._supervise("router", self._router_command, self._router_ready, lifeline)
        self._workers = [
            self._supervise(
                worker.worker_id,
                partial(self._worker_command, worker),
                partial(self._worker_ready, worker),
                lifeline,
            )
            for worker in plan.workers
        ]
        self._stores = [
            self._supervise(
                store.worker_id, partial(self._store_command, store), partial(self._store_ready, store), lifeline
            )
            for store in plan.stores
        ]

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
            await asyncio.gather(*(worker.stop(_MARGIN_S) for worker in (*self._workers, *self._stores)))

    async def _bring_up(self, group: asyncio.TaskGroup) -> None:
        await self._router.ready_once.wait()  # its port is now known
        self._output.fact(f"{'loading':<12} {', '.join(worker.worker_id for worker in self._plan.workers)}")
        for worker in (*self._workers, *self._stores):
            group.create_task(worker.keep())
        for worker in (*self._workers, *self._stores):  # stores learn from the workers what they keep
            await worker.settled.wait()
        await wait_until_ready(local_address(CONTROL_HOST, self._control_port), self._plan.certificates)
        await self._output.ready()

    def _supervise(
        self, name: str, command: Callable[[], list[str]], on_ready: Callable[[Ready], None], lifeline: Lifeline
    ) -> Supervised:
        output = self._output
        return Supervised(
            name,
            command,
            lifeline,
            output.event,
            on_ready=on_ready,
            output_fd=output.child_fd,
            on_start=partial(output.begun, name),
            on_progress=partial(output.progressed, name),
            on_end=partial(output.ended, name),
        )

    def _router_command(self) -> list[str]:
        plan = self._plan
        flags = ["--host", plan.host, "--port", str(self._port), "--http-port", str(self._http_port)]
        flags += ["--metrics-port", str(plan.router_metrics_port)]
        flags += ["--control-host", CONTROL_HOST, "--control-port", str(self._control_port)]
        return self._command("router", [*plan.router_flags, *flags])

    def _worker_command(self, worker: PlannedWorker) -> list[str]:
        router = local_address(CONTROL_HOST, self._control_port)
        flags = ["--worker-id", worker.worker_id, "--host", WORKER_HOST, "--port", "0", "--router", router]
        flags += ["--metrics-port", str(worker.metrics_port)]
        return self._command(worker.role, [*self._plan.worker_flags, *flags, *worker_flags(worker)])

    def _store_command(self, store: PlannedStore) -> list[str]:
        router = local_address(CONTROL_HOST, self._control_port)
        flags = ["--worker-id", store.worker_id, "--host", WORKER_HOST, "--port", "0", "--router", router]
        flags += ["--metrics-port", str(store.metrics_port)]
        flags += ["--served-model-name", self._plan.model.model_id]
        return self._command_of("kvtransfer", "store", [*self._plan.store_flags, *flags])

    def _command(self, role: str, flags: list[str]) -> list[str]:
        model = self._plan.model
        owner = "router" if role == "router" else "worker"
        return self._command_of(
            role, owner, [*flags, "--model", str(model.path), "--served-model-name", model.model_id]
        )

    def _command_of(self, role: str, owner: str, flags: list[str]) -> list[str]:
        """Returns what a child is started by. `owner` is whose certificate it gets. Of a flag that is there twice the
        last counts: what is planned for one process stands behind what all have."""
        return [*self._program, role, *flags, *_tls_flags(self._plan.tls_dir, owner)]

    def _router_ready(self, ready: Ready) -> None:
        self._port, self._control_port = ready.port, ready.control_port  # a restarted router takes the same ports
        self._output.fact(line_of("router", self._plan.host, ready))
        control = local_address(CONTROL_HOST, ready.control_port)
        self._output.fact(f"{'control':<12} {control}  (baton status, baton drain)")
        if ready.http_port:
            self._http_port = ready.http_port
            address = local_address(self._plan.host, ready.http_port)
            scheme = "https" if self._plan.has_public_tls else "http"
            self._output.fact(f"{'http':<12} {scheme}://{address}/v1  (OpenAI-style)")
        self._output.serving("router", ready)

    def _worker_ready(self, worker: PlannedWorker, ready: Ready) -> None:
        cores = ",".join(map(str, worker.share.cores))
        where = f"cores {cores}" if worker.device == "cpu" else f"{worker.device}, cores {cores}"
        self._output.fact(line_of(worker.worker_id, WORKER_HOST, ready) + f"  {where}")
        self._output.serving(worker.worker_id, ready)

    def _store_ready(self, store: PlannedStore, ready: Ready) -> None:
        self._output.fact(line_of(store.worker_id, WORKER_HOST, ready))
        self._output.serving(store.worker_id, ready)


def _tls_flags(folder: str, owner: str) -> list[str]:
    """Returns the flags of a process's certificate, even of none: the process would look at the environment."""
    files = {"cert": f"{owner}.pem", "key": f"{owner}.key", "ca": "ca.pem"}
    at = pathlib.Path(folder).absolute()
    return [f"--tls-{name}={at / file if folder else ''}" for name, file in files.items()]


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
