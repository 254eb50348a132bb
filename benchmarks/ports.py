"""Ports for processes that must be told theirs before they run.

Owns: that nothing else gets such a port before its process listens on it, except by asking for it by number. Never: who
listens.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 16_384
_KERNELS_LOWEST = 32_768
"""Where no file says what the kernel's are: Linux's default."""
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(number: int) -> list[int]:
    """Returns different ports on which nobody listens on 127.0.0.1.

    They are none of those that the kernel hands out. A port that the kernel chose and that is free again is soon given
    to another: to whoever listens on port 0, or as the near end of a connection.
    """
    ports: list[int] = []
    candidates = list(range(_LOWEST, kernels_lowest()))
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        if len(ports) == number:
            return ports
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                probe.listen()
            except OSError:
                continue
        ports.append(port)
    raise OSError(f"fewer than {number} ports are free")


def kernels_lowest() -> int:
    """Returns the lowest port that the kernel hands out."""
    try:
        return int(_RANGE.read_text().split()[0])
    except OSError:
        return _KERNELS_LOWEST
