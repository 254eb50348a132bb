"""Locks pages of host memory, so that a GPU copies to and from it directly instead of through a buffer of the driver.

Never: required. Where memory cannot be locked, copies are slower, and a line in the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)

_PORTABLE = 1
"""The flag cudaHostRegisterPortable, which locks the memory for the contexts of all devices."""


def pin(memory: memoryview) -> Callable[[], None]:
    """Locks `memory` for CUDA devices. Returns a function that unlocks it; call that before the memory is unmapped."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE))
    if error:
        log.warning(
            "%d MiB of staging are not page-locked (CUDA error %d): copies are slower", memory.nbytes >> 20, error
        )
        return lambda: None
    return lambda: runtime.cudaHostUnregister(address)
