"""Defines what a tier is: memory below the pool that keeps blocks by their hashes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from services.core.errors import TransferFailed
from services.core.hashing import BlockHash
from services.kv.regions import Buffer


class TierFailed(TransferFailed):
    """Says that a tier cannot be read or written now. Nothing depends on a tier: what it had is computed again."""


class TierFull(TierFailed):
    """Says that a tier takes no more, and can still be read."""


class ReadAbandoned(Exception):
    """Says that whoever wanted the blocks does not wait for them any more. The memory that is read to raises it."""


class BlockTarget(Protocol):
    """Takes the blocks that are read: a `BlockMemory`, or what stands before one."""

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        """Replaces the bytes of the blocks."""
        ...


class Tier(Protocol):
    """Keeps blocks of one layout. All methods may block, on the disk or on the network, and may be called on several
    threads at once; never on the event loop."""

    name: str
    """The kind of tier, for metrics: "host", "disk", or a backend's."""

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that the tier's blocks take, as far as it knows."""
        ...

    def num_held(self, hashes: Sequence[BlockHash]) -> int:
        """Returns how many blocks from the first on the tier has. It does not read them. Raises TierFailed."""
        ...

    def read(self, hashes: Sequence[BlockHash], memory: BlockTarget, targets: Sequence[int]) -> int:
        """Writes the blocks to the blocks `targets` of the memory, one each, and returns how many, from the first on.

        Each was found to be what it should be: of this layout, of its hash, and with its checksum. They are fewer where
        one is not there any more, or not what it should be. Nothing is written to the memory after it has returned,
        also if it raises. Raises TierFailed, and what the memory raises.
        """
        ...

    def write(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> None:
        """Keeps the blocks, for which others may be evicted. Those that are there already are not written again.

        The caller does not change them meanwhile. Raises TierFailed; some of the blocks may be kept then.
        """
        ...

    def close(self) -> None:
        """Frees what the tier has in this process. Afterwards nothing is called."""
        ...


class LocalTier(Tier, Protocol):
    """Knows all that it holds, so that the worker can tell routers."""

    @property
    def num_slots(self) -> int:
        """Returns how many blocks it can hold."""
        ...

    def follow(self, on_store: Callable[[BlockHash], None], on_remove: Callable[[BlockHash], None]) -> None:
        """Has the listeners called as blocks enter and leave the tier from now on, on any thread; for those that are
        there already, `on_store` at once."""
        ...

    def held(self) -> Iterator[BlockHash]: ...
