"""Tests that the limits of a container are read, whichever version of cgroups its engine uses."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from services.cli import machine
from services.core.container import cpu_quota, memory_limit
from services.engine.loading import host_bytes

CPU = {
    "v2": {"cpu.max": "150000 100000\n"},
    "v1": {"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"},
}
MEMORY = {
    "v2": {"memory.max": "5000\n", "memory.current": "2000\n"},
    "v1": {"memory/memory.limit_in_bytes": "5000\n", "memory/memory.usage_in_bytes": "2000\n"},
}
UNLIMITED = {
    "v2": {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "2000\n"},
    "v1": {
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "2000\n",
    },
    "none": {},
}


def lay(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("version", CPU)
def test_what_a_container_may_use(version: str, tmp_path: Path) -> None:
    group = lay(tmp_path, CPU[version] | MEMORY[version])
    assert cpu_quota(group) == 1.5
    assert memory_limit(group) == (5000, 2000)
    assert machine.memory_bytes(group) == (3000, 5000)
    assert host_bytes(group) == 5000, "a worker's pool is a share of it"


@pytest.mark.parametrize("version", UNLIMITED)
def test_without_a_limit_the_machine_is_the_limit(version: str, tmp_path: Path) -> None:
    group = lay(tmp_path, UNLIMITED[version])
    assert cpu_quota(group) is None
    total = psutil.virtual_memory().total
    assert machine.memory_bytes(group)[1] == total
    assert host_bytes(group) == total
