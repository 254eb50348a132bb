"""Makes hosts of their own for processes on this machine: network namespaces, each joined to the router's by a link of
a bounded rate. Neither shared memory nor loopback leads from one to another.

Owns: the namespaces and their links, and that nothing is left of them. Never: what runs there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

_SUBNET = "198.18"
"""For tests of networks (RFC 2544); the next part is this process's own."""
HUB = "hub"
"""The router's host."""
_DEVICE = "eth0"


class CannotSeparate(Exception):
    """Says why this machine does not let network namespaces be made."""


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
        added = _done("ip", "netns", "add", f"{self._prefix}-{HUB}")
        if added.returncode:
            raise CannotSeparate(added.stderr.strip())
        self._join(("ip",), self._prefix, self._base + ".1", HUB, self._base + ".2")
        _run(*self.command(HUB), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for number, name in enumerate(self._names, 1):
            _run("ip", "netns", "add", f"{self._prefix}-{name}")
            gateway, address = (f"{self._base}.{4 * number + end}" for end in (1, 2))
            self._join(("ip", "-n", f"{self._prefix}-{HUB}"), name, gateway, name, address)
            _run("ip", "-n", f"{self._prefix}-{name}", "route", "add", "default", "via", gateway)
        self.throttle(self._rate)

    def throttle(self, rate: str) -> None:
        """Gives each link this rate, in both directions."""
        for name in self._names:
            for host, device in ((HUB, name), (name, _DEVICE)):
                shape = ("tbf", "rate", rate, "burst", "128kb", "latency", "100ms")
                _run("tc", "-n", f"{self._prefix}-{host}", "qdisc", "replace", "dev", device, "root", *shape)

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
        link = ("ip", "-n", f"{self._prefix}-{HUB}", "link", "set", name)
        _run(*link, "down")
        try:
            yield
        finally:
            _run(*link, "up")

    def remove(self) -> None:
        """Removes what there is. The processes in them must have ended."""
        _done("ip", "link", "del", self._prefix)
        for name in (*self._names, HUB):
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


def _run(*command: str) -> None:
    done = _done(*command)
    assert not done.returncode, f"{' '.join(command)}: {done.stderr.strip() or done.returncode}"


def _done(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
