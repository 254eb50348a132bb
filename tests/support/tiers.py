"""Makes tiers for tests: memory of some blocks to read to, and a file whose disk fails as it is told."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from services.kvtransfer.tiers.disk import DiskTier, slot_bytes_for
from services.kvtransfer.tiers.slot_file import DirectFile, SlotFile, page_aligned
from services.kvtransfer.tiers.tier import Tier
from services.kvtransfer.transports.staging import StagingArea

BLOCK_BYTES = 6000
"""Not of whole pages."""
FINGERPRINT = "ab" * 16


def a_hash(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def a_block(number: int, num_bytes: int = BLOCK_BYTES) -> bytes:
    """Returns bytes that no other number's block has."""
    return (hashlib.blake2b(number.to_bytes(8, "little")).digest() * (num_bytes // 64 + 1))[:num_bytes]


def hashes_of(numbers: Sequence[int]) -> list[bytes]:
    return [a_hash(number) for number in numbers]


def blocks_of(numbers: Sequence[int]) -> list[bytes]:
    return [a_block(number) for number in numbers]


def memory_of(num_blocks: int, block_bytes: int = BLOCK_BYTES) -> StagingArea:
    """Returns a `BlockMemory`, zero at first."""
    return StagingArea(num_blocks, block_bytes)


def read_from(tier: Tier, *numbers: int) -> int:
    """Returns how many of these blocks the tier gives, each of which must be what was written."""
    memory = memory_of(len(numbers))
    try:
        num_read = tier.read(hashes_of(numbers), memory, range(len(numbers)))
        assert content(memory)[:num_read] == blocks_of(numbers[:num_read])
        return num_read
    finally:
        memory.close()


def content(memory: StagingArea) -> list[bytes]:
    return [bytes(block) for block in memory.read_blocks(range(memory.num_blocks))]


class FaultyFile:
    """Is a `SlotFile` that fails, is slow, or changes what is read, as its fields say."""

    def __init__(self, file: SlotFile) -> None:
        self.slot_bytes = file.slot_bytes
        self.file = file
        self.write_errno = 0
        self.read_errno = 0
        self.torn_at: int | None = None
        """The number of bytes after which the next write ends, as if the process was killed."""
        self.flipped_at: int | None = None
        """The byte of each slot that is read wrong."""
        self.answering = threading.Event()
        """Reads wait for it."""
        self.answering.set()
        self.taking = threading.Event()
        """Writes wait for it."""
        self.taking.set()
        self.told = threading.Event()
        """Set by each write."""
        self.num_reads = 0
        self.asked = threading.Event()

    def cut(self, num_slots: int) -> int:
        return self.file.cut(num_slots)

    def read(self, slot: int, buffer: memoryview) -> int:
        self.num_reads += 1
        self.asked.set()
        self.answering.wait()
        if self.read_errno:
            raise OSError(self.read_errno, os.strerror(self.read_errno))
        num_bytes = self.file.read(slot, buffer)
        if self.flipped_at is not None and self.flipped_at < num_bytes:
            buffer[self.flipped_at] ^= 1
        return num_bytes

    def write(self, slot: int, buffer: memoryview) -> None:
        self.told.set()
        self.taking.wait()
        if self.write_errno:
            raise OSError(self.write_errno, os.strerror(self.write_errno))
        if self.torn_at is not None:
            before = bytearray(len(buffer))
            num_bytes = self.file.read(slot, aligned := page_aligned(len(buffer)))
            before[:num_bytes] = aligned[:num_bytes]
            whole = page_aligned(len(buffer))
            whole[:] = bytes(buffer[: self.torn_at]) + bytes(before[self.torn_at :])
            self.file.write(slot, whole)
            raise OSError(errno.EIO, "killed")
        self.file.write(slot, buffer)

    def close(self) -> None:
        self.file.close()


def faulty_disk(path: Path, num_slots: int, fingerprint: str = FINGERPRINT) -> tuple[DiskTier, FaultyFile]:
    """Returns a disk tier that has not been loaded yet, and its file."""
    slot_bytes = slot_bytes_for(BLOCK_BYTES)
    file = FaultyFile(DirectFile(str(path), slot_bytes))
    return DiskTier(file, fingerprint, BLOCK_BYTES, num_slots * slot_bytes), file


def loaded_disk(path: Path, num_slots: int) -> DiskTier:
    tier, _ = faulty_disk(path, num_slots)
    tier.load()
    return tier
