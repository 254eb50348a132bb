"""Names the machine on which something was measured."""

from __future__ import annotations

from pathlib import Path


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
    amx = "amx_bf16" in Path("/proc/cpuinfo").read_text()
    return f"{name} ({'with' if amx else 'no'} AMX)"
