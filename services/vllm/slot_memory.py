"""Keeps the slots: the host memory from and to which KV is handed over, one slot for each block of the pool.

vLLM's ranks copy their parts of a block to its slot and back. They map the memory before it is sealed; what peers get
then is sealed like any worker's pool. Owns: the memory. Never: who holds a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from services.core.sealed_memory import SealedMemory
from services.kv.regions import Buffer, Region


class SlotMemory:
    """Implements a `BlockMemory` that peers can map."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._memory = SealedMemory("baton-vllm-slots", num_blocks * block_bytes, seal=False)
        self._region = Region(self._memory.address, num_blocks * block_bytes, "cpu")
        self._bytes = self._memory.map

    @property
    def fd(self) -> int | None:
        return self._memory.fd

    def seal(self) -> None:
        """Allows no further writable mapping: every rank has its own."""
        self._memory.seal()

    def touch(self, num_used: int) -> bool:
        """Has the kernel allocate memory of the slots after the first `num_used` (see `SealedMemory.touch`)."""
        return self._memory.touch(num_used * self.block_bytes)

    def region(self, block_id: int) -> Region:
        return self._region.part(block_id * self.block_bytes, self.block_bytes)

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        return [self._block(block_id).toreadonly() for block_id in block_ids]

    def copy_blocks(self, block_ids: Sequence[int], targets: Sequence[memoryview]) -> None:
        for block_id, target in zip(block_ids, targets, strict=True):
            _copy(target, self._block(block_id))

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        for block_id, each in zip(block_ids, data, strict=True):
            _copy(self._block(block_id), each)

    def fill_blocks(self, block_ids: Sequence[int], fill: Callable[[Sequence[memoryview]], None]) -> None:
        fill([self._block(block_id) for block_id in block_ids])

    def close(self) -> None:
        self._memory.close()

    def _block(self, block_id: int) -> memoryview:
        return self._bytes[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]


def _copy(target: memoryview, source: Buffer) -> None:
    # numpy lets go of the interpreter's lock while it copies, a memoryview keeps it.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
