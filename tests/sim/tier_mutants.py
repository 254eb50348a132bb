"""Plants deliberate bugs in tiers: in what is believed of a block that comes back, in the copies ahead of eviction, and
in what is told of both."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from services.core.hashing import BlockHash
from services.engine.engine import Engine
from services.kv.pool import CachedBlock
from services.kv.regions import BlockMemory, Buffer
from services.kv.tier_index import TierIndex
from services.kvtransfer.tiers import disk, host
from services.kvtransfer.tiers.disk import DiskTier
from services.kvtransfer.tiers.entry import Label, unpack_label
from services.kvtransfer.tiers.slot_file import PAGE_BYTES
from services.worker.tiers import WorkerTiers
from tests.sim.mutation import Bug, Mutant, both, replaced

# What comes back.


def believes_a_disk_without_checksums() -> Bug:
    def fits(self: Label, fingerprint: bytes, hash: BlockHash, block: Buffer) -> bool:
        return self.fingerprint == fingerprint and self.hash == hash

    return replaced(Label, "fits", fits)


def believes_host_memory_without_checksums() -> Bug:
    return replaced(host, "checksum", lambda block: 0)


class _Equal(bytes):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def takes_blocks_of_another_fingerprint() -> Bug:
    def unpack(data: Buffer) -> Label | None:
        label = unpack_label(data)
        return label and dataclasses.replace(label, fingerprint=_Equal())

    return replaced(disk, "unpack_label", unpack)


def takes_blocks_of_another_hash() -> Bug:
    fits = Label.fits
    return replaced(Label, "fits", lambda self, fingerprint, hash, block: fits(self, fingerprint, self.hash, block))


def believes_what_it_finds_after_a_start() -> Bug:
    load, read = DiskTier.load, DiskTier._read

    def load_and_believe(self: Any) -> None:
        load(self)
        self.found = set(self._index._slot_of.items())

    def believe(self: Any, hash: BlockHash, memory: BlockMemory, target: int, stop: threading.Event) -> bool:
        slot = self._index.find(hash)
        if (hash, slot) not in self.found:
            return read(self, hash, memory, target, stop)
        self._file.read(slot, self._buffer())
        memory.write_blocks([target], [self._buffer()[PAGE_BYTES : PAGE_BYTES + self._block_bytes]])
        return True

    return both(replaced(DiskTier, "load", load_and_believe), replaced(DiskTier, "_read", believe))


# What is copied.


def keeps_copies_of_blocks_that_were_evicted_meanwhile() -> Bug:
    def unchanged(self: Engine, blocks: Sequence[CachedBlock]) -> list[bool]:
        return [True] * len(blocks)

    return replaced(Engine, "unchanged", unchanged)


def indexes_a_slot_before_it_is_written() -> Bug:
    write = DiskTier.write

    def index_and_write(self: Any, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> None:
        take, put = self._index.take, self._index.put
        early = iter([hash for hash in hashes if hash not in self._index])

        def take_and_put() -> int | None:
            slot: int | None = take()
            if slot is not None:
                put(slot, next(early))
                self._index._writing.add(slot)
            return slot

        self._index.take, self._index.put = take_and_put, lambda slot, hash: self._index._writing.discard(slot)
        try:
            write(self, hashes, blocks)
        finally:
            del self._index.take, self._index.put

    return replaced(DiskTier, "write", index_and_write)


def forgets_the_slot_of_a_failed_write() -> Bug:
    return replaced(TierIndex, "give_back", lambda self, slot: None)


# What is told.


def tells_of_blocks_that_have_left_the_tiers() -> Bug:
    return replaced(WorkerTiers, "_removed", lambda self, hash, tier: None)


MUTANTS: list[Mutant] = [
    believes_a_disk_without_checksums,
    believes_host_memory_without_checksums,
    takes_blocks_of_another_fingerprint,
    takes_blocks_of_another_hash,
    believes_what_it_finds_after_a_start,
    keeps_copies_of_blocks_that_were_evicted_meanwhile,
    indexes_a_slot_before_it_is_written,
    forgets_the_slot_of_a_failed_write,
    tells_of_blocks_that_have_left_the_tiers,
]
