"""What `baton up` starts, and with what share of the machine: pure arithmetic.

Owns: dividing cores, ports and memory among the children. Never: asks the machine anything, or starts anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from services.core.errors import ConfigError

ROLES = ("prefill", "decode", "mixed")

# Of the memory that is available when the cluster starts, this much goes to weights and pools; the rest is for
# interpreters, activations and the system.
MEMORY_SHARE = 0.6
# A worker's KV pool is not grown past this by default: more holds only older prefixes.
MAX_POOL_BYTES = 4 << 30


@dataclasses.dataclass(frozen=True)
class CoreShare:
    """Cores a worker may run on, and the threads it computes with."""

    cores: tuple[int, ...]
    threads: int
    own: bool
    """No other worker runs there, and each thread has a core."""


def divide_cores(
    cores: Sequence[int], num_workers: int, *, threads: int | None = None, quota: float | None = None
) -> list[CoreShare]:
    """One share per worker: neighbouring cores, disjoint while there are enough; more workers than cores share.

    `threads`: so many for each worker, instead of an even part. `quota`: CPU time the container may use, in cores;
    threads beyond it would only be throttled. Earlier workers get the cores that are left over.
    """
    if num_workers == 0:
        return []
    if not cores:
        raise ConfigError("no CPU core may be used")
    if threads is not None:
        return [_explicit(cores, index, threads, num_workers) for index in range(num_workers)]
    if num_workers >= len(cores):
        own = num_workers == len(cores)
        return [CoreShare((cores[index % len(cores)],), 1, own) for index in range(num_workers)]
    shares = []
    start = 0
    for size in _even(len(cores), num_workers):
        allowed = size if quota is None else max(1, min(size, int(quota / num_workers)))
        shares.append(CoreShare(tuple(cores[start : start + size]), allowed, own=quota is None))
        start += size
    return shares


def _explicit(cores: Sequence[int], index: int, threads: int, num_workers: int) -> CoreShare:
    width = min(threads, len(cores))
    enough = width * num_workers <= len(cores)
    start = index * width if enough else index * len(cores) // num_workers  # else spread over the ring of cores
    taken = tuple(sorted(cores[(start + offset) % len(cores)] for offset in range(width)))
    return CoreShare(taken, threads, own=enough and threads == width)


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (1 if index < total % parts else 0) for index in range(parts)]


def plan_metrics_ports(port: int, metrics_port: int | None, num_children: int, *, default: int = 9400) -> list[int]:
    """Metrics port of each child, the router first; 0 lets the child pick a free one.

    They count up from `metrics_port`; left out, they follow `port`: free if it is 0, else from `default`.
    """
    first = metrics_port if metrics_port is not None else (0 if port == 0 else default)
    if first == 0:
        return [0] * num_children
    ports = list(range(first, first + num_children))
    if ports[-1] > 65535:
        raise ConfigError(f"--metrics-port: {num_children} ports from {first} on pass 65535")
    if port in ports:
        raise ConfigError(f"--metrics-port: the ports {ports[0]} to {ports[-1]} include --port {port}")
    return ports


def plan_http_port(port: int, http_port: int | None, metrics_ports: Sequence[int], *, default: int = 8000) -> int:
    """The router's HTTP port. Left out, it follows `port`: free if that is 0, else `default`. -1 is none."""
    chosen = http_port if http_port is not None else (0 if port == 0 else default)
    if chosen > 0 and chosen in (port, *metrics_ports):
        raise ConfigError(f"--http-port: {chosen} is also --port or one of the metrics ports")
    return chosen


def plan_workers(prefill: int | None, decode: int | None, mixed: int | None) -> list[str]:
    """Roles of the workers, in order. Nothing said means one prefill and one decode worker."""
    if prefill is None and decode is None and mixed is None:
        prefill = decode = 1
    counts = dict(zip(ROLES, (prefill or 0, decode or 0, mixed or 0), strict=True))
    if counts["decode"] + counts["mixed"] == 0:
        raise ConfigError("--decode: without a decode or a mixed worker no request can finish")
    if counts["prefill"] + counts["mixed"] == 0:
        raise ConfigError("--prefill: without a prefill or a mixed worker no request can start")
    return [role for role in ROLES for _ in range(counts[role])]


def memory_utilization(available_bytes: int, total_bytes: int, weights_bytes: int, num_workers: int) -> float:
    """Each worker's share of the machine's whole memory, for its weights and its pool together."""
    fair = MEMORY_SHARE * available_bytes / max(1, num_workers)
    return min(fair, weights_bytes + MAX_POOL_BYTES) / total_bytes
