"""Tests that whatever does not compute starts without the packages of the extras."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.process

_SERVE = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"there is no {{name}}")

sys.meta_path.insert(0, Missing())
import services.cli.main, services.cli.up, services.router.main, services.store.main
"""
_EXTRAS = ("worker", "worker-vllm", "redis", "s3", "nixl")
_IMPORTED_AS = {"nixl_cu13": "nixl"}


def test_router_store_and_commands_start_without_any_extra() -> None:
    """What is needed always stands among the dependencies, or it would be missing from the router's image."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {_name(line) for extra in _EXTRAS for line in extras[extra]}
    assert {"torch", "numpy", "obstore", "redis", "nixl"} <= names
    command = [sys.executable, "-c", _SERVE.format(missing=sorted(names))]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert process.returncode == 0, process.stderr[-2000:]


def _name(requirement: str) -> str:
    name = requirement.partition(";")[0]
    for mark in "<>=~[ ":
        name = name.partition(mark)[0]
    name = name.strip().replace("-", "_")
    return _IMPORTED_AS.get(name, name)
