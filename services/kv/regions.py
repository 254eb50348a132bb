"""What kvtransfer sees of a worker's block pool: numbered blocks of bytes. The engine (or the store) owns them."""

from __future__ import annotations

from typing import Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
"""C-contiguous bytes (`collections.abc.Buffer` needs Python 3.12)."""


class BlockMemory(Protocol):
    """Read and written from this package's copy threads, never from the event loop."""

    @property
    def fd(self) -> int | None:
        """memfd behind the pool, block after block from offset 0; None if a peer cannot map it."""
        ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def read_block(self, block_id: int) -> Buffer:
        """The block's bytes: a view, or a copy off the device."""
        ...

    def copy_block(self, block_id: int, target: memoryview) -> None:
        """Writes the block's bytes to `target`, host memory of that size. They are in place when it returns."""
        ...

    def write_block(self, block_id: int, data: Buffer) -> None:
        """Replaces the block's bytes. The data is in place when it returns."""
        ...
