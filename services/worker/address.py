"""Chooses the address that others dial and the worker's name, where the configuration has none.

Owns: the defaults of `--advertise` and `--worker-id`, which must differ between containers and between hosts. Never:
the values that were given; nor a change of address while the worker runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import socket
from collections.abc import Sequence
from typing import TypeVar

from services.core.addresses import is_loopback, is_wildcard, join, parse
from services.core.errors import ConfigError
from services.worker.config import PeerConfig

Config = TypeVar("Config", bound=PeerConfig)


async def completed(config: Config, role: str, port: int) -> Config:
    """Returns the config with advertise and worker_id filled in, for a worker on `port`.

    Raises ConfigError if no address is known.
    """
    advertise = config.advertise or join(await _host(config), port)
    # On loopback, a port belongs to one worker. On other addresses, every host and every container may use the same
    # port.
    name = f"{role}-{port}" if is_loopback(config.host) else f"{role}-{_host_name()}-{port}"
    return dataclasses.replace(config, advertise=advertise, worker_id=config.worker_id or name)


def _host_name() -> str:
    """Returns the name of this host, with a dash for each character that a worker's name may not have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:100]


async def _host(config: PeerConfig) -> str:
    """Returns the bound host, or for a wildcard the address this machine uses on the way to a router."""
    if not is_wildcard(config.host):
        return config.host
    for target in config.router:
        for address in await _resolve(*parse(target)):
            if (source := _source_address(address)) is not None:
                return source
    for _, sockaddr in await _resolve(socket.gethostname(), 0):
        if not is_loopback(sockaddr[0]):
            return str(sockaddr[0])
    raise ConfigError(f"--advertise: bound to {config.host}, and no router and no host name tells under which address")


async def _resolve(host: str, port: int) -> Sequence[tuple[int, tuple[str, int]]]:
    """Returns (family, socket address) pairs; empty if the name cannot be resolved (yet)."""
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return [(info[0], info[4]) for info in infos]  # type: ignore[misc]  # an IPv6 socket address is longer


def _source_address(target: tuple[int, tuple[str, int]]) -> str | None:
    """Returns this machine's address on the route to `target`, or None if there is no route.

    Connecting a datagram socket sends nothing.
    """
    family, sockaddr = target
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(sockaddr)
        except OSError:
            return None
        return str(probe.getsockname()[0])
