"""Gives memory back to the operating system; the C allocator keeps freed memory unless it is asked to return it.

A router is small except for the requests it reads, which come and go by the hundred megabytes. Without glibc the
functions do nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
from collections.abc import Callable

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 20
_PAUSE_S = 0.25


def separate_large_blocks() -> None:
    """Makes the allocator map every block above a mebibyte separately, so that it is returned when it is freed.

    By default glibc raises that limit to the size of whatever was freed (up to 32 MiB), and large blocks then lie in
    the heap, where a small one behind them keeps them.
    """
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def trim() -> None:
    """Returns free memory to the operating system.

    It takes milliseconds, without the interpreter lock: call it on a thread.
    """
    malloc_trim = _glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


class Trimmer:
    """Trims shortly after much memory was freed, once for several such reports."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._trimming: asyncio.Future[None] | None = None

    def soon(self) -> None:
        """Plans a trim. Call on the event loop."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._trim)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _trim(self) -> None:
        self._timer = None
        self._trimming = asyncio.get_running_loop().run_in_executor(None, trim)


@functools.cache
def _glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None)
