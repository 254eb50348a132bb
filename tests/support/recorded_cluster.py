"""Runs a router and workers as real processes that reach each other, and are reached, through recorders alone.

Owns: the processes and the recorders, and the check that no connection goes past them. Never: what is looked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from baton.v1 import control_pb2, control_pb2_grpc
from benchmarks.ports import free_ports
from services.cli.child import Child, Lifeline
from services.rpc.authentication import ROUTER
from services.rpc.certificates import Certificates
from tests.support.certificates import certificates
from tests.support.patience import Patience
from tests.support.processes import BATON, environment
from tests.support.recorder import Recorder
from tests.support.trusted import dial

_OUTSIDE = "127.0.0.2"
"""Where workers are reached, at the ports that they have at 127.0.0.1: sockets for KV say their own ports."""
_READY_WITHIN_S = 60.0


@dataclass
class RecordedCluster:
    model: Path
    temp: Path
    tls: Path | None
    """A folder with certificates; None for all in the clear."""
    recorders: dict[str, Recorder] = field(default_factory=dict)
    """By what they stand before: public, http, control, and for each worker its name and its name with -kv."""
    children: dict[str, Child] = field(default_factory=dict)
    num_seen: int = 0
    """Connections looked at between processes and recorders."""

    @property
    def operator(self) -> Certificates | None:
        return certificates(self.tls, "operator") if self.tls is not None else None

    def flags(self, role: str) -> list[str]:
        if self.tls is None:
            return []
        files = (f"{role}.pem", f"{role}.key", "ca.pem")
        flags = zip(("--tls-cert", "--tls-key", "--tls-ca"), files, strict=True)
        return ["--cluster-auth", "both", *(part for flag, file in flags for part in (flag, str(self.tls / file)))]

    def require_recorded(self) -> None:
        """Asserts that the processes have no connection but to recorders."""
        owned = {child.pid for child in self.children.values()}
        ours = {each.port for each in self.recorders.values()}
        for pid in owned:
            for each in psutil.Process(pid).net_connections(kind="inet"):
                if each.status == psutil.CONN_ESTABLISHED:
                    self.num_seen += 1
                    # Either it dialled a recorder, or a recorder dialled it.
                    assert each.raddr.port in ours or self._is_of_this_process(each.raddr.port), each

    def _is_of_this_process(self, port: int) -> bool:
        here = psutil.Process(os.getpid()).net_connections(kind="inet")
        return any(each.laddr.port == port for each in here)

    async def status(self) -> control_pb2.GetStatusResponse:
        address = f"127.0.0.1:{self.recorders['control'].port}"
        async with dial(address, certificates=self.operator, role=ROUTER if self.tls is not None else "") as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            return await stub.GetStatus(control_pb2.GetStatusRequest(), timeout=30.0, wait_for_ready=True)

    async def until_all_ready(self, num_workers: int) -> None:
        patience = Patience(_READY_WITHIN_S)
        while sum(each.state == control_pb2.WORKER_STATE_READY for each in (await self.status()).workers) < num_workers:
            assert not patience.is_over(), "the workers are not ready"
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def recorded_cluster(
    model: Path, temp: Path, workers: dict[str, tuple[str, ...]], *router_flags: str, tls: Path | None
) -> AsyncIterator[RecordedCluster]:
    """Yields a cluster that is ready. `workers` are the flags of each by its name, which begins with its role."""
    cluster, lifeline = RecordedCluster(model, temp, tls), Lifeline()
    program = ["env", "-i", *(f"{name}={value}" for name, value in environment(temp).items()), *BATON]

    async def record(name: str, host: str = "127.0.0.1", port: int = 0) -> Recorder:
        recorder = cluster.recorders[name] = Recorder()
        await recorder.open(host, port)
        stack.push_async_callback(recorder.close)
        return recorder

    async def start(name: str, *command: str) -> Child:
        child = cluster.children[name] = Child(name, [*program, *command, "--log-level", "warning"], lifeline)
        stack.push_async_callback(child.kill)
        return child

    async with contextlib.AsyncExitStack() as stack:
        stack.callback(lifeline.close)
        control, public, http = [await record(name) for name in ("control", "public", "http")]
        ports = free_ports(3)
        for recorder, port in zip((public, control, http), ports, strict=True):
            recorder.aim(port)
        flags = [f"--{name}={port}" for name, port in zip(("port", "control-port", "http-port"), ports, strict=True)]
        await start("router", "router", "--model", str(model), *flags, *router_flags, *cluster.flags("router"))
        for name, (port, kv_port) in zip(workers, _pairs(free_ports(2 * len(workers))), strict=True):
            role = name.partition("-")[0]
            (await record(name, _OUTSIDE, port)).aim(port)
            (await record(f"{name}-kv", _OUTSIDE, kv_port)).aim(kv_port)
            command = ["kvtransfer"] if role == "store" else [role, "--model", str(model)]
            where = [f"--port={port}", f"--kv-port={kv_port}", "--worker-id", name, "--advertise", f"{_OUTSIDE}:{port}"]
            where += ["--router", f"127.0.0.1:{control.port}"]
            role = "store" if role == "store" else "worker"
            await start(name, *command, *where, *workers[name], *cluster.flags(role))
        for child in cluster.children.values():
            assert await child.ready() is not None, f"{child.name} ended"
        await cluster.until_all_ready(len(workers))
        yield cluster


def _pairs(ports: list[int]) -> list[tuple[int, int]]:
    return list(zip(ports[::2], ports[1::2], strict=True))
