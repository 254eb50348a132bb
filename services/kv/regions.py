"""Defines what kvtransfer sees of a worker's block pool: numbered blocks of bytes, each a region of memory. Pure.

Owns: what a region is, and what the regions of a pool must be like. Never: the memory, which is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from services.core.errors import LayoutMismatch

Buffer: TypeAlias = bytes | bytearray | memoryview
"""C-contiguous bytes (`collections.abc.Buffer` needs Python 3.12)."""


@dataclass(frozen=True, slots=True)
class Region:
    """Names contiguous memory of this process or of its device, as a NIC must be told of it to read or write it."""

    address: int
    """The address of the first byte, as a pointer on the device."""
    length: int
    """The length in bytes."""
    device: str
    """"cpu", or an accelerator with its index, such as "cuda:0"."""

    def part(self, offset: int, length: int) -> Region:
        """Returns the region of `length` bytes that begins `offset` bytes into this one, and must lie within it."""
        assert 0 <= offset <= offset + length <= self.length, f"{offset} + {length} bytes of {self.length}"
        return Region(self.address + offset, length, self.device)


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

    def region(self, block_id: int) -> Region:
        """Returns where the block is. It stays there until the memory is freed."""
        ...

    def read_blocks(self, block_ids: Sequence[int]) -> Sequence[Buffer]:
        """Returns the blocks' bytes: views of them, or copies off the device."""
        ...

    def copy_blocks(self, block_ids: Sequence[int], targets: Sequence[memoryview]) -> None:
        """Writes each block's bytes to one of `targets`, host memory of `block_bytes` each. They are in place when it
        returns."""
        ...

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        """Replaces the bytes of each block. The data is in place when it returns; nothing is written after that, also
        if it raises."""
        ...

    def fill_blocks(self, block_ids: Sequence[int], fill: Callable[[Sequence[memoryview]], None]) -> None:
        """Replaces the bytes of each block by those that `fill` writes to a view of host memory, one for each block: of
        the block itself where it is there. The bytes are in place when it returns; nothing is written after that, also
        if it raises. No view may be kept."""
        ...


def check_regions(memory: BlockMemory, block_bytes: int) -> None:
    """Raises LayoutMismatch unless every block has the bytes that the layout says, and lies where peers look for it.

    Peers take both from the layout alone: with memory that is otherwise, they would copy parts of other blocks.
    """
    regions = [memory.region(block_id) for block_id in range(memory.num_blocks)]
    for block_id, region in enumerate(regions):
        if region.length != block_bytes:
            raise LayoutMismatch(f"block {block_id} has {region.length} bytes, and by the layout {block_bytes}")
    if memory.fd is not None:
        for block_id, region in enumerate(regions):
            if region.address != regions[0].address + block_id * block_bytes:
                raise LayoutMismatch(
                    f"block {block_id} does not follow the one before, and peers map the pool as a whole"
                )
