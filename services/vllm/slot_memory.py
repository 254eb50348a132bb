"""Keeps the slots: the host memory from and to which KV is handed over, one slot for each block of the pool.

vLLM's ranks copy their parts of a block to its slot and back. They map the memory before it is sealed; what peers get
then is sealed like any worker's pool. Owns: the memory. Never: who holds a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.kv.regions import Buffer
from services.kvtransfer.transports.staging import StagingArea


class SlotMemory(StagingArea):
    """Implements a `BlockMemory` that peers can map. Copies leave the interpreter's lock to others meanwhile."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        super().__init__(num_blocks, block_bytes, seal=False)

    def seal(self) -> None:
        """Allows no further writable mapping: every rank has its own."""
        self._memory.seal()

    def touch(self, num_used: int) -> bool:
        """Has the kernel allocate memory of the slots after the first `num_used` (see `SealedMemory.touch`)."""
        return self._memory.touch(num_used * self.block_bytes)

    def copy_blocks(self, block_ids: Sequence[int], targets: Sequence[memoryview]) -> None:
        for block_id, target in zip(block_ids, targets, strict=True):
            _copy(target, self.slot(block_id))

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        for block_id, each in zip(block_ids, data, strict=True):
            _copy(self.slot(block_id), each)


def _copy(target: memoryview, source: Buffer) -> None:
    # numpy lets go of the interpreter's lock while it copies, a memoryview keeps it.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
