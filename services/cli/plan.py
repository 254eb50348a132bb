"""Plans what `baton up` starts, and with what share of the machine.

Owns: dividing cores, ports and memory among the children. Never: asks the machine anything, or starts anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from services.cli.tables import size
from services.core.config import DEFAULT_CONTROL_PORT
from services.core.errors import ConfigError

ROLES = ("prefill", "decode", "mixed")

# Share of the memory available when the cluster starts that goes to weights and pools; the rest is for interpreters,
# activations and the system.
MEMORY_SHARE = 0.6
# Share of a GPU's memory for all workers on it; a single worker takes the same share by default.
GPU_MEMORY_SHARE = 0.9
# Share of the host's available memory that tiers and stores may take where nothing else is known to need it.
_MOST_KEPT = 0.9
# By default a worker's KV pool does not grow past this: more would only hold older prefixes.
MAX_POOL_BYTES = 4 << 30


@dataclasses.dataclass(frozen=True)
class CoreShare:
    """Names the cores that a worker may run on, and the number of threads it computes with."""

    cores: tuple[int, ...]
    threads: int
    own: bool
    """Whether no other worker runs there and each thread has a core."""


def divide_cores(
    cores: Sequence[int], num_workers: int, *, threads: int | None = None, quota: float | None = None
) -> list[CoreShare]:
    """Returns one share per worker: neighbouring cores, disjoint while there are enough; more workers than cores share.

    `threads` is the number for each worker, instead of an even part. `quota` is the CPU time the container may use, in
    cores; threads beyond it would only be throttled. Earlier workers get the cores that are left over.
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
    for num_cores in _even(len(cores), num_workers):
        allowed = num_cores if quota is None else max(1, min(num_cores, int(quota / num_workers)))
        shares.append(CoreShare(tuple(cores[start : start + num_cores]), allowed, own=quota is None))
        start += num_cores
    return shares


def _explicit(cores: Sequence[int], index: int, threads: int, num_workers: int) -> CoreShare:
    width = min(threads, len(cores))
    enough = width * num_workers <= len(cores)
    start = index * width if enough else index * len(cores) // num_workers  # otherwise spread over the ring of cores
    taken = tuple(sorted(cores[(start + offset) % len(cores)] for offset in range(width)))
    return CoreShare(taken, threads, own=enough and threads == width)


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (1 if index < total % parts else 0) for index in range(parts)]


def plan_metrics_ports(port: int, metrics_port: int | None, num_children: int, *, default: int = 9400) -> list[int]:
    """Returns the metrics port of each child, the router first; 0 lets the child pick a free one, -1 is none.

    They count up from `metrics_port`. If that is None, they are free ones if `port` is 0, else count from `default`.
    """
    first = metrics_port if metrics_port is not None else (0 if port == 0 else default)
    if first <= 0:
        return [first] * num_children
    ports = list(range(first, first + num_children))
    if ports[-1] > 65535:
        raise ConfigError(f"--metrics-port: {num_children} ports from {first} on pass 65535")
    if port in ports:
        raise ConfigError(f"--metrics-port: the ports {ports[0]} to {ports[-1]} include --port {port}")
    return ports


def plan_http_port(port: int, http_port: int | None, metrics_ports: Sequence[int], *, default: int = 8000) -> int:
    """Returns the router's HTTP port; -1 is none.

    If it is not given, it is a free one if `port` is 0, else `default`.
    """
    chosen = http_port if http_port is not None else (0 if port == 0 else default)
    if chosen > 0 and chosen in (port, *metrics_ports):
        raise ConfigError(f"--http-port: {chosen} is also --port or one of the metrics ports")
    return chosen


def plan_control_port(
    port: int, control_port: int | None, others: Sequence[int], *, default: int = DEFAULT_CONTROL_PORT
) -> int:
    """Returns the router's control port. If it is not given, it is a free one if `port` is 0, else `default`."""
    chosen = control_port if control_port is not None else (0 if port == 0 else default)
    if chosen > 0 and chosen in (port, *others):
        raise ConfigError(f"--control-port: {chosen} is also --port, --http-port or one of the metrics ports")
    return chosen


def plan_workers(prefill: int | None, decode: int | None, mixed: int | None) -> list[str]:
    """Returns the roles of the workers, in order. If no number is given, one prefill and one decode worker."""
    if prefill is None and decode is None and mixed is None:
        prefill = decode = 1
    counts = dict(zip(ROLES, (prefill or 0, decode or 0, mixed or 0), strict=True))
    for role, why in (
        ("decode", "no request can finish"),
        ("prefill", "decode workers would read the prompts too, which is what --mixed is for"),
    ):
        if counts[role] + counts["mixed"] == 0:
            raise ConfigError(
                f"--{role}: without a {role} or a mixed worker {why}; "
                f"add --{role} 1 (a number that is not given is 0 as soon as another one is)"
            )
    return [role for role in ROLES for _ in range(counts[role])]


def spread_devices(device: str, num_workers: int, num_gpus: int) -> list[tuple[str, float]]:
    """Returns (device, share of its memory) for each worker on GPUs.

    "cuda" takes all GPUs in turn, "cuda:1" only that one. Workers of one GPU share its memory evenly. Raises
    ConfigError for a GPU that does not exist.
    """
    kind, _, number = device.partition(":")
    if number and not (number.isdigit() and int(number) < num_gpus):
        raise ConfigError(f"--device: {device} is none of the {num_gpus} GPUs that torch sees")
    if num_gpus == 0:
        raise ConfigError(f"--device: {device}, but torch sees no GPU here")
    names = [device if number else f"{kind}:{index % num_gpus}" for index in range(num_workers)]
    return [(name, GPU_MEMORY_SHARE / names.count(name)) for name in names]


def memory_utilization(
    available_bytes: int, total_bytes: int, weights_bytes: int, num_workers: int, kept_bytes: int = 0
) -> float:
    """Returns each worker's share of the machine's whole memory, for its weights and its pool together.

    `kept_bytes` are those of tiers and stores. Raises ConfigError if they leave no room for the weights.
    """
    fair = (MEMORY_SHARE * available_bytes - kept_bytes) / max(1, num_workers)
    if kept_bytes and fair <= weights_bytes:
        need = f"{num_workers} workers need {size(weights_bytes)} each for weights alone, and pools"
        raise ConfigError(f"{_too_much(kept_bytes, available_bytes)}; {need}")
    return min(fair, weights_bytes + MAX_POOL_BYTES) / total_bytes


def demand_memory(available_bytes: int, kept_bytes: int) -> None:
    """Raises ConfigError unless the host has memory for that much KV in tiers and stores."""
    if kept_bytes > _MOST_KEPT * available_bytes:
        raise ConfigError(_too_much(kept_bytes, available_bytes))


def _too_much(kept_bytes: int, available_bytes: int) -> str:
    what = f"the workers' host tiers and the stores take {size(kept_bytes)}"
    return f"--kv-host-bytes, --kvtransfer-bytes: {what}, of the {size(available_bytes)} of memory available here"
