"""Defines what kvtransfer sees of a worker's block pool: numbered blocks of bytes. The engine owns them."""

from __future__ import annotations

from typing import Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
"""C-contiguous bytes (`collections.abc.Buffer` needs Python 3.12)."""


class BlockMemory(Protocol):
    """Gives access to the bytes of blocks. Only kvtransfer's copy threads read and write them, never the event loop."""

    @property
    def fd(self) -> int | None:
        """Returns the memfd that has the pool, block after block from offset 0; None if a peer cannot map it."""
        ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def read_block(self, block_id: int) -> Buffer:
        """Returns the block's bytes: a view of them, or a copy off the device."""
        ...

    def copy_block(self, block_id: int, target: memoryview) -> None:
        """Writes the block's bytes to `target`, host memory of `block_bytes`. They are in place when it returns."""
        ...

    def write_block(self, block_id: int, data: Buffer) -> None:
        """Replaces the block's bytes. The data is in place when it returns."""
        ...
