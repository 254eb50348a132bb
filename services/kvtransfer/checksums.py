"""Computes and checks a block's optional checksum (xxh3-64): a corrupted block ends as DATA_LOSS, not a wrong token."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from services.core.errors import CorruptBlock
from services.kv.regions import BlockMemory, Buffer


def checksum(block: Buffer) -> int:
    return int(xxhash.xxh3_64_intdigest(block))


def checksums_of(memory: BlockMemory, block_ids: Sequence[int]) -> list[int]:
    """Returns the checksums of blocks, as they now are in memory. For a copy thread."""
    return [checksum(block) for block in memory.read_blocks(block_ids)]


def verify(memory: BlockMemory, block_ids: Sequence[int], expected: Sequence[int]) -> None:
    """Raises CorruptBlock unless the blocks, as they now are in memory, have the checksums that the source announced.

    Without checksums it checks nothing.
    """
    if not expected:
        return
    # No name refers to a view of the memory when this raises: the error's traceback would keep it.
    for block_id, computed, announced in zip(block_ids, checksums_of(memory, block_ids), expected, strict=True):
        if computed != announced:
            raise CorruptBlock(f"block {block_id} differs from what its source announced")
