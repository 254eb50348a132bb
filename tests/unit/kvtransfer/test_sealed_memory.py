"""Tests that memory that is handed out is sealed, and what is handed to us is looked at before it is mapped."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.core import sealed_memory
from services.core.sealed_memory import SEALS, SealedMemory, what_is_wrong

NUM_BYTES = 4 * mmap.PAGESIZE


@pytest.fixture
def memory() -> Iterator[SealedMemory]:
    memory = SealedMemory("baton-unit", NUM_BYTES)
    yield memory
    memory.close()


def test_its_size_and_content_are_its_owner_s(memory: SealedMemory) -> None:
    fd = memory.fd
    assert fd is not None
    refused: list[Callable[[], object]] = [
        lambda: os.ftruncate(fd, 0),
        lambda: os.ftruncate(fd, 2 * NUM_BYTES),
        lambda: os.pwrite(fd, b"x", 0),
        lambda: mmap.mmap(fd, NUM_BYTES),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ]
    for act in refused:
        with pytest.raises(PermissionError):
            act()
    memory.map[5] = 7
    with mmap.mmap(fd, NUM_BYTES, prot=mmap.PROT_READ) as seen:
        assert seen[5] == 7, "its owner writes, and others see it"
        memory.close()
        memory.map[5] = 8
        assert seen[5] == 8, "also when its descriptor is closed"


def test_what_is_sealed_and_long_enough_may_be_mapped(memory: SealedMemory) -> None:
    assert memory.fd is not None
    assert what_is_wrong(memory.fd, NUM_BYTES) is None
    handed_out = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY)
    assert what_is_wrong(handed_out, NUM_BYTES) is None
    os.close(handed_out)
    assert what_is_wrong(memory.fd, NUM_BYTES + 1) == f"it has {NUM_BYTES} bytes instead of {NUM_BYTES + 1}"


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, 0x10, fcntl.F_SEAL_SEAL])
def test_every_seal_is_needed(missing: int) -> None:
    fd = os.memfd_create("unit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NUM_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS & ~missing)
    assert "not sealed" in (what_is_wrong(fd, NUM_BYTES) or "")
    os.close(fd)


def test_what_is_no_memfd() -> None:
    with tempfile.TemporaryFile() as file:
        assert what_is_wrong(file.fileno(), 0) == "it is no memfd"
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        assert "not sealed" in (what_is_wrong(file.fileno(), 0) or "")
    fd = os.memfd_create("unit")
    assert "not sealed" in (what_is_wrong(fd, 0) or ""), "Python's default lets nobody seal it"
    os.close(fd)


def test_huge_pages(memory: SealedMemory) -> None:
    try:
        fd = os.memfd_create("unit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"this kernel has no huge pages: {error}")
    os.ftruncate(fd, 2 << 20)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    assert what_is_wrong(fd, NUM_BYTES) == "it is of huge pages"
    os.close(fd)


def test_a_kernel_that_cannot_seal_leaves_memory_for_its_owner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def old(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_ADD_SEALS and argument & 0x10:
            raise OSError(22, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", old)
    memory = SealedMemory("baton-unit", NUM_BYTES)
    assert memory.fd is None
    memory.map[5] = 7
    assert memory.map[5] == 7
    memory.map.release()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    assert not [link for link in links if os.path.islink(link) and "baton-unit" in os.readlink(link)]


def test_it_is_unmapped_with_its_last_view() -> None:
    memory = SealedMemory("baton-unmapped", 5 << 20)
    view, address = memory.map[3:], memory.address
    memory.close()
    del memory
    view[0] = 1
    assert _pages_of("baton-unmapped") == [address]
    del view
    assert _pages_of("baton-unmapped") == []


def test_populated_memory_keeps_its_contents() -> None:
    """Checks whole huge pages, and what lies behind the last."""
    memory = SealedMemory("baton-populated", (4 << 20) + 8192)
    memory.map[(2 << 20) + 1] = 9
    for offset, num_bytes in ((0, 2 << 20), (2 << 20, 2 << 20), (4 << 20, 8192)):
        assert memory.populate(offset, num_bytes)
    assert memory.address % (2 << 20) == 0
    assert bytes(memory.map[(2 << 20) : (2 << 20) + 3]) == b"\x00\x09\x00"
    memory.close()
    assert not memory.populate(0, 4096), "others may use it no longer"


def test_populated_memory_is_of_huge_pages_where_the_kernel_makes_some() -> None:
    memory = SealedMemory("baton-huge", 4 << 20)
    assert memory.populate(0, 4 << 20)
    if _kib_in_huge_pages(memory.address) == 0:
        asked = sealed_memory._LIBRARY.madvise(memory.address, 4 << 20, sealed_memory._MADV_COLLAPSE)
        assert asked != 0, "the kernel makes some if it is asked"
        pytest.skip("this kernel makes none")
    assert _kib_in_huge_pages(memory.address) == 4096


def _kib_in_huge_pages(address: int) -> int:
    """Returns the KiB of the mapping at this address that huge pages hold."""
    mapping = Path("/proc/self/smaps").read_text().partition(f"\n{address:x}-")[2]
    return int(mapping.partition("ShmemPmdMapped:")[2].split()[0])


def _pages_of(name: str) -> list[int]:
    """Returns where memory of that name is mapped."""
    with open("/proc/self/maps") as maps:
        return [int(line.partition("-")[0], 16) for line in maps if name in line]
