"""Where others reach this worker, and what it is called there, when nobody has said so.

Owns: the defaults of `--advertise` and `--worker-id`, which containers and other hosts must not share. Never: what was
given; nor a change of address while the worker runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import socket
from collections.abc import Sequence

from services.core.errors import ConfigError
from services.worker.config import WorkerConfig


async def completed(config: WorkerConfig, role: str, port: int) -> WorkerConfig:
    """The config with advertise and worker_id filled in, for a worker on `port`. ConfigError: no address is known."""
    advertise = config.advertise or join(await _host(config), port)
    # On loopback a port is one worker's. Beyond it every host, and every container, may have the same one.
    name = f"{role}-{port}" if _is_loopback(config.host) else f"{role}-{socket.gethostname()}-{port}"
    return dataclasses.replace(config, advertise=advertise, worker_id=config.worker_id or name)


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


async def _host(config: WorkerConfig) -> str:
    """What was bound, or for a wildcard the address this machine has on the way to a router."""
    if not _is_wildcard(config.host):
        return config.host
    for target in config.router:
        host, _, port = target.rpartition(":")
        for address in await _resolve(host.strip("[]"), int(port) if port.isdecimal() else 0):
            if (source := _source_address(address)) is not None:
                return source
    for _, sockaddr in await _resolve(socket.gethostname(), 0):
        if not _is_loopback(sockaddr[0]):
            return str(sockaddr[0])
    raise ConfigError(f"--advertise: bound to {config.host}, and no router and no host name tells under which address")


async def _resolve(host: str, port: int) -> Sequence[tuple[int, tuple[str, int]]]:
    """(family, socket address) pairs; none where the name is not known (yet)."""
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return [(info[0], info[4]) for info in infos]  # type: ignore[misc]  # longer for IPv6


def _source_address(target: tuple[int, tuple[str, int]]) -> str | None:
    """Ours, on the route to `target`; None where there is none. Connecting a datagram socket sends nothing."""
    family, sockaddr = target
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(sockaddr)
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
