"""Decides in which order blocks that nobody uses are evicted. Pure.

Owns: the order. Never: which blocks are in use, or what becomes of an evicted one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from services.core.hashing import BlockHash


class EvictionOrder(Protocol):
    """Orders the blocks that could be evicted, named by their hashes. A block that comes into use is taken out, and put
    in again afterwards."""

    def __len__(self) -> int: ...

    def __contains__(self, hash: BlockHash) -> bool: ...

    def __iter__(self) -> Iterator[BlockHash]:
        """Yields the hashes about as they would be evicted if nothing else happened, the next one first."""
        ...

    def add(self, hash: BlockHash) -> None:
        """Puts a block in, which is not there: a new one, or one whose use has ended."""
        ...

    def use(self, hash: BlockHash) -> None:
        """Takes out a block that comes into use."""
        ...

    def touch(self, hash: BlockHash) -> None:
        """Notes that a block was used that is in, and stays in."""
        ...

    def forget(self, hash: BlockHash) -> None:
        """Takes out a block whose content is gone without an eviction."""
        ...

    def evict(self) -> BlockHash:
        """Takes out the block to be evicted next. There must be one."""
        ...


class LeastRecentlyUsed:
    """Evicts the block that was used least recently. It is an `EvictionOrder`."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, hash: BlockHash) -> bool:
        return hash in self._blocks

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._blocks)

    def add(self, hash: BlockHash) -> None:
        self._blocks[hash] = None

    def use(self, hash: BlockHash) -> None:
        del self._blocks[hash]

    def touch(self, hash: BlockHash) -> None:
        self._blocks.move_to_end(hash)

    def forget(self, hash: BlockHash) -> None:
        del self._blocks[hash]

    def evict(self) -> BlockHash:
        return self._blocks.popitem(last=False)[0]
