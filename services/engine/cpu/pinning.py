"""Locks pages of host memory, so that a GPU copies to and from it directly instead of through a buffer of the driver.

Owns: the calls of the CUDA runtime. Never: the memory itself. If it cannot be locked, copies are slower, and a warning
is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from services.kv.regions import Region

log = logging.getLogger(__name__)

_PORTABLE = 1
"""The flag cudaHostRegisterPortable, with which the memory counts as locked in the contexts of all devices."""


def pin(memory: Region) -> Callable[[], None]:
    """Locks the pages of host memory for CUDA devices.

    Returns a function that unlocks it, to be called before the memory is unmapped. If CUDA refuses, it logs a warning
    and the function does nothing.
    """
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(memory.address, memory.length, _PORTABLE))
    if error:
        log.warning(
            "%d MiB of staging are not page-locked (CUDA error %d): copies are slower", memory.length >> 20, error
        )
        return lambda: None
    return lambda: runtime.cudaHostUnregister(memory.address)
