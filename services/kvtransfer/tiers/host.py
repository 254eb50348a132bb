"""Keeps blocks in this process's memory: below a pool on a GPU, whose memory is smaller."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence

from services.core.hashing import BlockHash
from services.kv.eviction import EvictionOrder
from services.kv.regions import Buffer
from services.kv.s3_fifo import S3Fifo
from services.kv.tier_index import TierIndex
from services.kvtransfer.checksums import checksum
from services.kvtransfer.tiers.tier import BlockTarget


class HostTier:
    """Has slots of one block each in anonymous memory, of which a page is taken when it is first written."""

    name = "host"

    def __init__(self, block_bytes: int, num_bytes: int, order: EvictionOrder | None = None) -> None:
        """Makes the tier of `num_bytes` bytes, which are at least those of one block. Raises OSError."""
        num_slots = num_bytes // block_bytes
        self._block_bytes = block_bytes
        self._index = TierIndex(num_slots, order if order is not None else S3Fifo())
        self._checksums = [0] * num_slots
        self._map = mmap.mmap(-1, num_slots * block_bytes)
        self._memory = memoryview(self._map)
        self._lock = threading.Lock()
        """Guards all of it, and is held for the copy of one block at a time."""

    @property
    def num_slots(self) -> int:
        return self._index.num_slots

    @property
    def num_bytes(self) -> int:
        return len(self._index) * self._block_bytes

    def follow(self, on_store: Callable[[BlockHash], None], on_remove: Callable[[BlockHash], None]) -> None:
        with self._lock:
            self._index.follow(on_store, on_remove)

    def held(self) -> Iterator[BlockHash]:
        with self._lock:
            return iter(list(self._index.held()))

    def num_held(self, hashes: Sequence[BlockHash]) -> int:
        with self._lock:
            return self._index.num_held(hashes)

    def read(self, hashes: Sequence[BlockHash], memory: BlockTarget, targets: Sequence[int]) -> int:
        for number, (hash, target) in enumerate(zip(hashes, targets, strict=True)):
            with self._lock:
                slot = self._index.find(hash)
                if slot is None:
                    return number
                with self._slot(slot) as block:
                    if checksum(block) != self._checksums[slot]:
                        self._index.drop(slot, hash)
                        return number
                    memory.write_blocks([target], [block])
        return len(targets)

    def write(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> None:
        for hash, block in zip(hashes, blocks, strict=True):
            assert memoryview(block).nbytes == self._block_bytes, "a block of this layout"
            with self._lock:
                if hash in self._index or (slot := self._index.take()) is None:
                    continue
                with self._slot(slot) as held:
                    held[:] = memoryview(block).cast("B")
                self._checksums[slot] = checksum(block)
                self._index.put(slot, hash)

    def close(self) -> None:
        with self._lock:
            self._index.clear()
            self._memory.release()
            self._map.close()

    def _slot(self, slot: int) -> memoryview:
        return self._memory[slot * self._block_bytes : (slot + 1) * self._block_bytes]
