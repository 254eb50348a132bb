"""Makes and checks identifiers. They are random where nobody may guess them, or where processes that do not know of
each other must not make the same."""

from __future__ import annotations

import pathlib
import re
import secrets
import socket

WORKER_ID_FORM = "1 to 128 of A-Z a-z 0-9 . _ : -, the first a letter or a digit"
_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def is_worker_id(text: str) -> bool:
    """Returns whether `text` is a worker id: such a text is safe in logs, metric labels and file names."""
    return _WORKER_ID.fullmatch(text) is not None


def new_incarnation() -> int:
    """Returns a random 64-bit number for one process start; it is never 0."""
    return secrets.randbits(64) or 1


def new_lease_id() -> bytes:
    """Returns 128 random bits, so that nobody can guess a live lease; a lease id that its owner does not know is
    invalid."""
    return secrets.token_bytes(16)


def new_request_id() -> str:
    return "req-" + secrets.token_hex(8)


def new_seed() -> int:
    return secrets.randbits(63)


def random_hex(num_digits: int) -> str:
    """Returns random hexadecimal digits."""
    return secrets.token_hex((num_digits + 1) // 2)[:num_digits]


def host_id() -> str:
    """Returns an id that processes on one running kernel share, also across containers. Shared memory is tried only
    between workers with the same id. Where the kernel gives no boot id, it is the host name."""
    boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id")
    try:
        return boot_id.read_text().strip()
    except OSError:
        return socket.gethostname()
