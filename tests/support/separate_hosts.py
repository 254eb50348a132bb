"""Has a cluster whose workers stand on hosts of their own: network namespaces of this machine, joined to that of the
router by links of a bounded rate. Neither shared memory nor loopback leads from one to another.

Owns: the namespaces and their links, and that nothing is left of them. Never: what a test expects of the cluster.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from tests.support.real_cluster import RealCluster, RouterClient, Service
from tests.support.trusted import dial

_SUBNET = "198.18"
"""For tests of networks (RFC 2544); the next part is this process's own."""
_HUB = "hub"
_DEVICE = "eth0"


class CannotSeparate(Exception):
    """Says why this machine does not let a test make network namespaces."""


class Hosts:
    """Are the namespaces: the router's, and one for each name in `names`."""

    def __init__(self, names: Sequence[str], rate: str) -> None:
        """`rate` is that of each link, in both directions, as tc takes it."""
        self._prefix = f"bt{os.getpid()}"
        self._base = f"{_SUBNET}.{os.getpid() % 256}"
        self._names = names
        self._rate = rate
        self.router = f"{self._base}.2"
        """The address of the router's host, from here and from the others."""

    def command(self, name: str) -> list[str]:
        """Returns what runs a command on the host."""
        return ["ip", "netns", "exec", f"{self._prefix}-{name}"]

    def make(self) -> None:
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise CannotSeparate("ip and tc are not on this machine")
        added = _done("ip", "netns", "add", f"{self._prefix}-{_HUB}")
        if added.returncode:
            raise CannotSeparate(added.stderr.strip())
        self._join(("ip",), self._prefix, self._base + ".1", _HUB, self._base + ".2")
        _run(*self.command(_HUB), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for number, name in enumerate(self._names, 1):
            _run("ip", "netns", "add", f"{self._prefix}-{name}")
            gateway, address = (f"{self._base}.{4 * number + end}" for end in (1, 2))
            self._join(("ip", "-n", f"{self._prefix}-{_HUB}"), name, gateway, name, address)
            _run("ip", "-n", f"{self._prefix}-{name}", "route", "add", "default", "via", gateway)
            for host, device in ((_HUB, name), (name, _DEVICE)):
                shape = ("tbf", "rate", self._rate, "burst", "128kb", "latency", "100ms")
                _run("tc", "-n", f"{self._prefix}-{host}", "qdisc", "add", "dev", device, "root", *shape)

    def _join(self, ip: Sequence[str], device: str, address: str, name: str, far_address: str) -> None:
        """Joins the namespace in which `ip` acts to the one of a host, where the link is `_DEVICE`."""
        there = f"{self._prefix}-{name}"
        _run(*ip, "link", "add", device, "type", "veth", "peer", "name", _DEVICE, "netns", there)
        _run(*ip, "addr", "add", f"{address}/30", "dev", device)
        _run(*ip, "link", "set", device, "up")
        _run("ip", "-n", there, "addr", "add", f"{far_address}/30", "dev", _DEVICE)
        _run("ip", "-n", there, "link", "set", _DEVICE, "up")
        _run("ip", "-n", there, "link", "set", "lo", "up")

    @contextlib.contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """Lets nothing pass to or from a host while the context is open; nobody is told."""
        link = ("ip", "-n", f"{self._prefix}-{_HUB}", "link", "set", name)
        _run(*link, "down")
        try:
            yield
        finally:
            _run(*link, "up")

    def remove(self) -> None:
        """Removes what there is. The processes in them must have ended."""
        _done("ip", "link", "del", self._prefix)
        for name in (*self._names, _HUB):
            _done("ip", "netns", "del", f"{self._prefix}-{name}")


@contextlib.contextmanager
def hosts(*names: str, rate: str) -> Iterator[Hosts]:
    """Makes them. Raises CannotSeparate."""
    made = Hosts(names, rate)
    try:
        made.make()
        yield made
    finally:
        made.remove()


class SeparateCluster(RealCluster):
    """Has its router on the hub, and each worker on the host of its name. Nobody goes through a proxy."""

    def __init__(self, model: Path, temp: Path, worker_flags: Sequence[str], hosts: Hosts) -> None:
        super().__init__(model, temp, worker_flags)
        self.hosts = hosts

    async def start(
        self, stack: contextlib.AsyncExitStack, workers: Sequence[str], router_flags: Sequence[str]
    ) -> None:
        reached = ("--host", "0.0.0.0", "--allow-plain-token", "--log-level", "warning", "--model", str(self._model))
        command = [*self.hosts.command(_HUB), *self._program, "router", *reached, "--control-host", "0.0.0.0"]
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


def _run(*command: str) -> None:
    done = _done(*command)
    assert not done.returncode, f"{' '.join(command)}: {done.stderr.strip() or done.returncode}"


def _done(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
