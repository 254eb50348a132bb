"""Keeps glibc from giving freed memory back to the kernel after every step.

Owns: a process-wide setting of the C allocator. A step's tensors are large, so glibc would map them anew each time, and
the kernel would zero them page by page, which takes several times as long as computing their contents.
"""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""Largest threshold, in bytes, that glibc accepts on 64-bit machines."""


def keep_freed_memory() -> None:
    """Makes the C allocator keep freed memory. Call it before other threads allocate. It has no effect where the C
    library has no mallopt."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        logger.info("no mallopt: freed memory goes back to the kernel")
        return
    library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    library.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    # Arenas other than the first unmap whole heaps in spite of the threshold, and the step thread would get one of
    # them.
    library.mallopt(_M_ARENA_MAX, 1)
