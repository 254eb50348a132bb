"""Has a cluster whose workers stand on hosts of their own (`benchmarks.hosts`).

Owns: the processes on these hosts. Never: what a test expects of the cluster.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from benchmarks.hosts import HUB, Hosts, hosts
from tests.support.real_cluster import RealCluster, RouterClient, Service
from tests.support.trusted import dial


class SeparateCluster(RealCluster):
    """Has its router on the hub, and each worker on the host of its name. Nobody goes through a proxy."""

    def __init__(self, model: Path, temp: Path, worker_flags: Sequence[str], hosts: Hosts) -> None:
        super().__init__(model, temp, worker_flags)
        self.hosts = hosts

    async def start(
        self, stack: contextlib.AsyncExitStack, workers: Sequence[str], router_flags: Sequence[str]
    ) -> None:
        reached = ("--host", "0.0.0.0", "--allow-plain-token", "--log-level", "warning", "--model", str(self._model))
        command = [*self.hosts.command(HUB), *self._program, "router", *reached, "--control-host", "0.0.0.0"]
        command += ["--split", "always", *router_flags]
        router = self.services["router-0"] = Service("router-0", lambda: command, self._lifeline, None)
        await router.start()
        channels = [
            await stack.enter_async_context(dial(f"{self.hosts.router}:{port}"))
            for port in (router.port, router.control_port)
        ]
        self.routers.append(RouterClient(*channels))
        for name in workers:
            joined = ("--worker-id", name, "--router", f"{self.hosts.router}:{router.control_port}")
            place = [*self.hosts.command(name), *self._program, name.partition("-")[0]]
            self._place(name, [*place, *reached, *joined, *self._worker_flags])
        await self.whole()

    def _place(self, name: str, command: list[str]) -> None:
        self.services[name] = Service(name, lambda: command, self._lifeline, None)


@contextlib.asynccontextmanager
async def separate_cluster(
    model: Path, temp: Path, workers: Sequence[str], *worker_flags: str, router_flags: Sequence[str] = (), rate: str
) -> AsyncIterator[SeparateCluster]:
    """Yields a cluster that is ready, over links of this rate. Raises CannotSeparate."""
    async with contextlib.AsyncExitStack() as stack:
        cluster = SeparateCluster(model, temp, worker_flags, stack.enter_context(hosts(*workers, rate=rate)))
        stack.push_async_callback(cluster.close)
        await cluster.start(stack, workers, router_flags)
        yield cluster
