"""Reads the limits of the container that this process is in, by cgroups of version 2 or 1. Changes nothing."""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""A container finds its own group there. The root group of version 2 has no limits, and none of these files."""


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Returns the CPU time that the container may use, in cores; None without a limit."""
    quota = _numbers(cgroup, "cpu.max") or _numbers(cgroup / "cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    return quota[0] / quota[1] if quota and quota[0] > 0 else None


def memory_limit(cgroup: Path = CGROUP) -> tuple[int, int] | None:
    """Returns (limit, used) of the container's memory, in bytes; None without a limit. Version 1 may return a limit
    that no machine has."""
    return _numbers(cgroup, "memory.max", "memory.current") or _numbers(
        cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
    )


def _numbers(folder: Path, *names: str) -> tuple[int, int] | None:
    """Returns the two numbers that these files have; None if they are not there, or the first says "max"."""
    try:
        first, second = " ".join((folder / name).read_text() for name in names).split()
    except OSError:
        return None
    return None if first == "max" else (int(first), int(second))
