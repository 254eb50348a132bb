"""What this machine offers `baton up`: cores and memory, as a container's limits leave them. Only reads."""

from __future__ import annotations

import os
import pathlib

import psutil

_CGROUP = pathlib.Path("/sys/fs/cgroup")


def usable_cores() -> list[int]:
    """Cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def cpu_quota(cgroup: pathlib.Path = _CGROUP) -> float | None:
    """CPU time the container may use, in cores; None without a limit."""
    words = _words(cgroup / "cpu.max")
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def memory_bytes(cgroup: pathlib.Path = _CGROUP) -> tuple[int, int]:
    """(available now, in all) of the machine, or of the container where that is less."""
    memory = psutil.virtual_memory()
    available, total = int(memory.available), int(memory.total)
    limit, used = _words(cgroup / "memory.max"), _words(cgroup / "memory.current")
    if limit and used and limit[0] != "max":
        available = min(available, max(0, int(limit[0]) - int(used[0])))
        total = min(total, int(limit[0]))
    return available, total


def directory_bytes(path: pathlib.Path) -> int:
    """Size of a model's weight files."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _words(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # no cgroup v2, or the root group, which has no limits
        return []
