"""Describes the machine that a result was measured on, and what else it did meanwhile. Every result file has both.

A figure without its processor, instruction sets and load cannot be compared with another.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

import psutil

from services.engine.native.instruction_sets import cpu_flags, cpu_name, usable

_ROOT = Path(__file__).resolve().parents[1]
_AMX_FLAGS = ("amx_tile", "amx_bf16", "amx_int8", "amx_fp16")
_VARIABLES = (
    "BATON_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "OMP_NUM_THREADS",
    "GOMP_SPINCOUNT",
    "OMP_PROC_BIND",
)
"""Variables that change what the processor is used for."""
_KIND_FIELDS = ("cpu family", "model", "stepping", "CPU implementer", "CPU part")


def describe() -> dict[str, object]:
    """Returns what is true of this machine and this checkout whatever runs on it."""
    return {
        "cpu": cpu_name() or platform.processor(),
        "cpu_kind": cpu_kind(),
        "instruction_sets": [*(each.name for each in usable()), *(flag for flag in _AMX_FLAGS if flag in cpu_flags())],
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "baton_commit": baton_commit(),
    }


def cpu_kind(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Returns the numbers that tell generations of one name apart; none where the kernel does not list them."""
    fields = (line.partition(":") for line in cpuinfo.read_text().partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in fields if name.strip() in _KIND_FIELDS}


def baton_commit(root: Path = _ROOT) -> str:
    """Returns the commit of this checkout, with "+" if files differ from it; "" outside a checkout."""
    try:
        return _git(root, "rev-parse", "--short=12", "HEAD") + (
            "+" if _git(root, "status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return ""


class Watch:
    """Notes what else the machine did, from the moment it is made until `note`."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._load = os.getloadavg()
        self._began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._before, self._began_s = _cpu_seconds(stat), time.monotonic()

    def note(self) -> dict[str, object]:
        """Returns the load averages at the start, and of all cores' time since then the shares, in percent, that were
        used by anybody and that the hypervisor gave to others."""
        passed = {name: now - self._before[name] for name, now in _cpu_seconds(self._stat).items()}
        total = sum(passed.values()) or 1.0
        return {
            "began": self._began,
            "seconds": round(time.monotonic() - self._began_s, 1),
            "load_average_at_start": [round(each, 2) for each in self._load],
            "busy_percent": round(100 * (1 - (passed["idle"] + passed["iowait"]) / total), 2),
            "stolen_percent": round(100 * passed["steal"] / total, 2),
        }


def _cpu_seconds(stat: Path) -> dict[str, float]:
    """Returns the seconds of all cores since the machine started, by kind, from the first line of /proc/stat."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    numbers = stat.read_text().splitlines()[0].split()[1 : 1 + len(names)]
    return {name: int(number) / os.sysconf("SC_CLK_TCK") for name, number in zip(names, numbers, strict=True)}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
