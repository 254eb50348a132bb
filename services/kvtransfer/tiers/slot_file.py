"""Reads and writes the slots of one file, past the page cache where the file system allows it.

Owns: the descriptor, its lock, and what direct I/O asks of buffers. Never: what is in a slot.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from typing import Protocol

PAGE_BYTES = 4096
"""Direct I/O wants offsets, lengths and addresses to be multiples of the disk's logical block size, of which this is
one."""


def pages(num_bytes: int) -> int:
    """Returns the bytes of the whole pages that `num_bytes` take."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class SlotFile(Protocol):
    """Has numbered slots of `slot_bytes` bytes each, one after another. Any method may raise OSError."""

    slot_bytes: int

    def cut(self, num_slots: int) -> int:
        """Removes all slots but the first `num_slots`, and returns how many of those have ever been written."""
        ...

    def read(self, slot: int, buffer: memoryview) -> int:
        """Reads the start of a slot to a page-aligned buffer of whole pages. Returns how many bytes there were."""
        ...

    def write(self, slot: int, buffer: memoryview) -> None:
        """Writes a whole slot from a page-aligned buffer."""
        ...

    def close(self) -> None: ...


class DirectFile:
    """Is a `SlotFile` on a local file system. Only one process at a time can have the file."""

    def __init__(self, path: str, slot_bytes: int) -> None:
        """Opens the file, or makes it. Raises OSError; BlockingIOError if another process has it, PermissionError if
        another user made it or can open it: whoever can write to it can forge blocks, and to read it is to read
        prompts."""
        assert slot_bytes % PAGE_BYTES == 0, "slots are whole pages"
        self.slot_bytes = slot_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self.direct = True
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:  # which says that this file system has no direct I/O
                raise
            self.direct = False
            self._fd = os.open(path, flags, 0o600)
        try:
            _demand_own(self._fd, path)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise

    def cut(self, num_slots: int) -> int:
        size = os.fstat(self._fd).st_size
        if size > num_slots * self.slot_bytes:
            size = num_slots * self.slot_bytes
            os.ftruncate(self._fd, size)
        return -(-size // self.slot_bytes)

    def read(self, slot: int, buffer: memoryview) -> int:
        return os.preadv(self._fd, [buffer], slot * self.slot_bytes)

    def write(self, slot: int, buffer: memoryview) -> None:
        written = os.pwritev(self._fd, [buffer], slot * self.slot_bytes)
        if written != len(buffer):  # on a disk that has become full, the rest would raise
            raise OSError(errno.ENOSPC, f"{written} of {len(buffer)} bytes were written")

    def close(self) -> None:
        os.close(self._fd)


def _demand_own(fd: int, path: str) -> None:
    """Raises OSError unless it is a file that only this user can open, by this name alone."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is no plain file", path)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or status.st_nlink != 1:
        raise PermissionError(errno.EPERM, "other users made it or can open it: remove it", path)


def page_aligned(num_bytes: int) -> memoryview:
    """Returns zeroed memory of whole pages, of at least `num_bytes` bytes. It is freed with its last view."""
    return memoryview(mmap.mmap(-1, pages(num_bytes)))
