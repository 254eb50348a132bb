"""Reads what this machine offers `baton up`: cores and memory, within a container's limits. Changes nothing."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys

import psutil

from services.cli.plan import spread_devices
from services.core.container import CGROUP, memory_limit


def usable_cores() -> list[int]:
    """Returns the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def memory_bytes(cgroup: pathlib.Path = CGROUP) -> tuple[int, int]:
    """Returns (bytes available now, bytes in total) of the machine, or of the container where that is less."""
    memory = psutil.virtual_memory()
    available, total = int(memory.available), int(memory.total)
    if (limit := memory_limit(cgroup)) is None:
        return available, total
    limit_bytes, used_bytes = limit
    return min(available, max(0, limit_bytes - used_bytes)), min(total, limit_bytes)


@functools.cache
def num_gpus(python: str = "") -> int:
    """Returns the number of GPUs that a worker would see. `python` has the worker's torch; by default this one has.

    It asks in a child process, since torch is large, and with CUDA it holds GPU memory.
    """
    command = [python or sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return int(asked.stdout) if asked.returncode == 0 else 0


def demand_device(device: str, python: str = "") -> None:
    """Raises ConfigError if `device` is a GPU that is not here. Call it before slow work, such as fetching a model.
    `python` is that of `num_gpus`."""
    if device.partition(":")[0] == "cuda":
        spread_devices(device, 1, num_gpus(python))


def directory_bytes(path: pathlib.Path) -> int:
    """Returns the size of a model's weight files, in bytes."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))
