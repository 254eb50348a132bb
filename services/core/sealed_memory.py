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
import weakref

F_SEAL_FUTURE_WRITE = 0x10
"""The seal against new writable mappings; existing ones stay writable. Since Linux 5.1, and not named in `fcntl`."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL

_HUGE_PAGE = 2 << 20
"""Bytes, on x86 and on ARM with pages of 4 KiB."""
_MADV_POPULATE_WRITE = 23
"""The advice to allocate pages for writing. Since Linux 5.14, and not named in `mmap`."""
_MADV_COLLAPSE = 25
"""The advice to make huge pages, whatever the system does by default. Since Linux 6.1, and not named in `mmap`."""
_PROT_NONE, _MAP_FIXED = 0, 0x10
"""Not named in `mmap`."""
_TOUCHED_AHEAD_BYTES = 256 << 20
_TOUCHED_AT_ONCE_BYTES = 2 << 20
_LIBRARY = ctypes.CDLL(None, use_errno=True)
_LIBRARY.mmap.restype = ctypes.c_void_p
_LIBRARY.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_LIBRARY.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBRARY.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SealedMemory:
    """Holds a sealed memfd. `map` is its only writable mapping, now and later. The memory is zero at first, and the
    kernel allocates a page when it is first written."""

    def __init__(self, name: str, num_bytes: int, *, seal: bool = True) -> None:
        """Without `seal` others may map it for writing too, until `seal` is called."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._num_bytes = num_bytes
        self._num_touched = 0
        """Bytes from the start that `touch` has had allocated."""
        self.fd: int | None = fd
        """File descriptor of the memory. None after `close`, and where the kernel cannot seal the memory: only this
        process can use it then."""
        try:
            os.ftruncate(fd, num_bytes)
            self.address = _mapped(fd, num_bytes)
            """The address of the first byte of `map`."""
        except BaseException:
            os.close(fd)
            raise
        memory = (ctypes.c_char * num_bytes).from_address(self.address)
        weakref.finalize(memory, _LIBRARY.munmap, self.address, num_bytes).atexit = False
        self.map = memoryview(memory).cast("B")
        """All bytes. They are unmapped when neither this nor a view or tensor of it is left."""
        if seal:
            self.seal()

    def seal(self) -> None:
        """Allows no further writable mapping, and no other size."""
        assert self.fd is not None, "it is open"
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError:
            self.close()

    def populate(self, offset: int, num_bytes: int) -> bool:
        """Has the kernel allocate the pages of a part now, which otherwise happens when each is first written.

        Whole huge pages are made where the kernel has some: attention reads blocks here and there, and finding their
        pages takes a fifth of its time otherwise. The contents do not change. `offset` is a multiple of the page size.
        Returns False if the kernel cannot.
        """
        if self.fd is None:
            return False
        start = self.address + offset
        if _LIBRARY.madvise(start, num_bytes, _MADV_POPULATE_WRITE):
            return False
        if offset % _HUGE_PAGE == 0 and num_bytes >= _HUGE_PAGE:  # of pages that are not there none are made
            _LIBRARY.madvise(start, num_bytes // _HUGE_PAGE * _HUGE_PAGE, _MADV_COLLAPSE)
        return True

    def touch(self, num_used: int) -> bool:
        """Has the kernel allocate some of the memory after the first `num_used` bytes, which is next. Returns whether
        there is more to do.

        A page that is first written costs the kernel microseconds, and a copy to new memory takes several times as long
        as one to memory that was used before. A call takes some milliseconds.
        """
        if self._num_touched >= min(num_used + _TOUCHED_AHEAD_BYTES, self._num_bytes):
            return False
        # A whole stretch, or the memory's end, wherever the bound lies in it: in less no huge page would be made.
        num_bytes = min(_TOUCHED_AT_ONCE_BYTES, self._num_bytes - self._num_touched)
        if not self.populate(self._num_touched, num_bytes):
            self._num_touched = self._num_bytes  # this kernel cannot: it is not tried again
            return False
        self._num_touched += num_bytes
        return True

    def close(self) -> None:
        """Closes the descriptor. Mappings of this and other processes stay until they are unmapped. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _mapped(fd: int, num_bytes: int) -> int:
    """Returns the address of a writable mapping. A huge page begins there: otherwise the kernel makes none in it.

    Raises OSError.
    """
    reserved_bytes = num_bytes + _HUGE_PAGE
    reserved = _mmap(None, reserved_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    begin = -(-reserved // _HUGE_PAGE) * _HUGE_PAGE
    try:
        _mmap(begin, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _LIBRARY.munmap(reserved, reserved_bytes)
        raise
    end = -(-(begin + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    if begin > reserved:
        _LIBRARY.munmap(reserved, begin - reserved)
    if end < reserved + reserved_bytes:
        _LIBRARY.munmap(end, reserved + reserved_bytes - end)
    return begin


def _mmap(address: int | None, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    mapped = _LIBRARY.mmap(address, num_bytes, protection, flags, fd, 0)
    if mapped == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(mapped)


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
