"""Makes and checks memory that another process may map without trusting its owner: a sealed memfd.

A sealed memfd cannot shrink or grow, and gets no further writable mapping. A process that maps one that is not sealed
is killed (SIGBUS) if the owner truncates it and the process reads there.
Owns: how such memory is made, and which seals it must have. Never: who is given it
(`services.kvtransfer.transports.shm`).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

F_SEAL_FUTURE_WRITE = 0x10
"""The seal against new writable mappings; existing ones stay writable. Since Linux 5.1, and not named in `fcntl`."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL

_MADV_POPULATE_WRITE = 23
"""The advice to allocate pages for writing. Since Linux 5.14, and not named in `mmap`."""
_LIBRARY = ctypes.CDLL(None)


class SealedMemory:
    """Holds a sealed memfd. `map` is its only writable mapping, now and later. The memory is zero at first, and the
    kernel allocates a page when it is first written."""

    def __init__(self, name: str, num_bytes: int) -> None:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.fd: int | None = fd
        """File descriptor of the memory. None after `close`, and where the kernel cannot seal the memory: only this
        process can use it then."""
        try:
            os.ftruncate(fd, num_bytes)
            self.map = mmap.mmap(fd, num_bytes)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
            """The address of the first byte of `map`."""
        except BaseException:
            os.close(fd)
            raise
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError:
            self.close()

    def populate(self, offset: int, num_bytes: int) -> bool:
        """Has the kernel allocate the pages of a part now, which otherwise happens when each is first written.

        The contents do not change. `offset` is a multiple of the page size. Returns False if the kernel cannot.
        """
        if self.fd is None:
            return False
        start = ctypes.c_void_p(self.address + offset)
        return bool(_LIBRARY.madvise(start, ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE) == 0)

    def close(self) -> None:
        """Closes the descriptor. Mappings of this and other processes stay until they are unmapped. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def what_is_wrong(fd: int, num_bytes: int) -> str | None:
    """Returns why another process's descriptor must not be mapped and read up to `num_bytes`, or None if it may."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return "it is no memfd"
    if seals & SEALS != SEALS:
        return f"it is not sealed ({seals:#x} instead of {SEALS:#x})"
    # Huge pages are not reserved before they are read, and if none is left then, the read kills the reader.
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        return "it is of huge pages"
    size = os.fstat(fd).st_size
    return None if size >= num_bytes else f"it has {size} bytes instead of {num_bytes}"
