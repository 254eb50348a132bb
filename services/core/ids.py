"""Identifiers: random where they must be unguessable or unique without coordination."""

from __future__ import annotations

import pathlib
import secrets
import socket


def new_incarnation() -> int:
    """Random 64-bit number of one process start; never 0."""
    return secrets.randbits(64) or 1


def new_lease_id() -> bytes:
    """128 random bits: an unknown lease is simply invalid, and no one can guess a live one."""
    return secrets.token_bytes(16)


def new_request_id() -> str:
    return "req-" + secrets.token_hex(8)


def new_seed() -> int:
    return secrets.randbits(63)


def host_id() -> str:
    """Equal for processes of one running kernel, containers included. Shared memory is tried only between equals."""
    boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id")
    try:
        return boot_id.read_text().strip()
    except OSError:
        return socket.gethostname()
