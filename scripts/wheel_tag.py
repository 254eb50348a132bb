"""Hatchling's build hook for the wheel that holds the CPU kernels: `scripts/wheels.py` turns it on, nothing else does.

The kernels are loaded by ctypes, so any Python of the architecture takes the wheel; what they demand is a glibc.
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WithKernels(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build_data["pure_python"] = False
        build_data["tag"] = os.environ["BATON_WHEEL_TAG"]
        build_data["artifacts"].append("/services/engine/native/kernels-*.so")
