"""Holds the memory of the block pool.

Owns: the bytes of all blocks and, on a CPU, the memfd that holds them, so that a peer on the same host can map it.
Never: who holds which block (`services.kv.pool`), or whose tokens are in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.core.sealed_memory import SealedMemory
from services.engine.attention.int8_rows import pack
from services.engine.model.device_copies import DeviceCopies
from services.engine.schedule.sequence import BlockCopy
from services.kv.layout import BlockShape, block_bytes, block_shape, row_length
from services.kv.regions import Buffer, Region

_COPY_DTYPE = torch.uint8


@dataclass(frozen=True, slots=True)
class KVShape:
    """Describes a block: [num_layers, 2 (key, value), block_size, num_kv_heads, row] contiguous elements of `dtype`. A
    row is [head_dim], and with int8 has its scale behind that (see `attention.int8_rows`)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def dimensions(self) -> BlockShape:
        """Returns the sizes of the dimensions, in the order above."""
        row = row_length(self.head_dim, str(self.dtype).removeprefix("torch."))
        return block_shape(self.num_layers, self.block_size, self.num_kv_heads, row)

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.dimensions, self.dtype.itemsize)

    def computed_in(self, activations: torch.dtype) -> torch.dtype:
        """Returns the type in which attention over such blocks computes, in a model with these activations."""
        return activations if self.dtype == torch.int8 else self.dtype


class KVCache:
    """Holds one tensor of all blocks: [num_blocks, num_layers, 2, block_size, num_kv_heads, row], zero at first."""

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_bytes = shape.block_bytes
        self.device = device
        self._memory: SealedMemory | None = None
        dimensions = (num_blocks, *shape.dimensions)
        if device.type == "cpu":
            self._memory = SealedMemory("baton-kv", num_blocks * self.block_bytes)
            # The tensors keep the mapping alive.
            self._blocks = torch.frombuffer(self._memory.map, dtype=shape.dtype).view(dimensions)
        else:
            self._blocks = torch.zeros(dimensions, dtype=shape.dtype, device=device)
        self._region = Region(self._blocks.data_ptr(), num_blocks * self.block_bytes, str(self._blocks.device))
        self._bytes = self._blocks.view(num_blocks, -1).view(_COPY_DTYPE)  # [num_blocks, block_bytes]
        self._copies = DeviceCopies(self._bytes) if device.type == "cuda" else None
        self._tokens = self._blocks.flatten(-2).view(-1, dimensions[-2] * dimensions[-1])
        self._keys = [self._blocks[:, layer, 0] for layer in range(shape.num_layers)]
        self._values = [self._blocks[:, layer, 1] for layer in range(shape.num_layers)]

    @property
    def fd(self) -> int | None:
        """Returns the memfd; None if no peer can map the memory: on a GPU, where the kernel cannot seal it, and after
        `close`."""
        return None if self._memory is None else self._memory.fd

    def keys(self, layer: int) -> Tensor:
        """Returns one layer's keys in all blocks: [num_blocks, block_size, num_kv_heads, row], a strided view."""
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        """Returns one layer's values in all blocks: [num_blocks, block_size, num_kv_heads, row], a strided view."""
        return self._values[layer]

    def rows(self, block_ids: Tensor, offsets: Tensor) -> Tensor:
        """Returns the rows of the pool to which `write` puts keys and values: [num_layers, 2 * num_tokens] int64.

        Each layer has the rows of all keys, then those of all values. Here a row is that of all kv heads.
        block_ids, offsets: [num_tokens] int64, each token's block and its place in it.
        """
        layers, _, size, _, _ = self.shape.dimensions
        key_rows = block_ids * (layers * 2 * size) + offsets
        both = torch.cat((key_rows, key_rows + size))
        return both + torch.arange(0, layers * 2 * size, 2 * size, device=both.device)[:, None]

    def write(self, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Writes the KV of new tokens in one layer.

        rows: [2 * num_tokens], what the method `rows` returned for that layer.
        key, value: [num_tokens, num_kv_heads, head_dim] of any type if the cache is int8, otherwise of the cache's.
        """
        both = torch.cat((key, value))
        if self.shape.dtype == torch.int8:
            both = pack(both)
        self._tokens.index_copy_(0, rows, both.flatten(1))

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zeroes blocks that the next step begins and does not fill.

        Attention reads whole blocks and gives masked tokens the weight 0, but 0 times a NaN that the block's last owner
        left there is NaN.
        """
        if block_ids:
            index = torch.tensor(block_ids, device=self.device)
            self._bytes.index_fill_(0, index, 0)

    def duplicate(self, copies: Sequence[BlockCopy]) -> None:
        """Copies whole blocks within the pool, on the device: for sequences that go on from one prompt."""
        for copy in copies:
            source, target = self._bytes[copy.source], self._bytes[copy.target]
            if self.device.type == "cpu":
                np.copyto(target.numpy(), source.numpy())  # torch would divide it among threads, and wait for them
            else:
                target.copy_(source)

    def touch(self, num_used: int) -> bool:
        """Has the kernel allocate some of the memory of the blocks that come after the first `num_used`, which are
        next. Returns whether there is more to do (see `SealedMemory.touch`)."""
        return self._memory is not None and self._memory.touch(num_used * self.block_bytes)

    def region(self, block_id: int) -> Region:
        """Returns where the block is: on a GPU, its device's address."""
        return self._region.part(block_id * self.block_bytes, self.block_bytes)

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Returns the blocks' bytes: on a CPU read-only views of the memory itself, elsewhere copies."""
        if self._copies is not None:
            return self._copies.read(block_ids)
        return [self._view(block_id).toreadonly() for block_id in block_ids]

    def copy_blocks(self, block_ids: Sequence[int], targets: Sequence[memoryview]) -> None:
        """Copies each block's bytes to one of the targets, host memory of `block_bytes` bytes each. All are there when
        it returns."""
        if self._copies is not None:
            self._copies.copy(block_ids, targets)
            return
        for block_id, target in zip(block_ids, targets, strict=True):
            # As in `write_blocks`, steps go on meanwhile.
            np.copyto(np.frombuffer(target, dtype=np.uint8), self._bytes[block_id].numpy())

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        """Replaces the bytes of blocks. The caller holds them, and no step reads them yet. All are in the pool when it
        returns. Raises ValueError unless there are `block_bytes` bytes for each."""
        for num_bytes in [memoryview(source).nbytes for source in data]:
            if num_bytes != self.block_bytes:
                raise ValueError(f"{num_bytes} bytes for a block of {self.block_bytes}")
        if self._copies is not None:
            self._copies.write(block_ids, data)
            return
        for block_id, source in zip(block_ids, data, strict=True):
            # Steps go on meanwhile: numpy lets go of the interpreter's lock while it copies, a memoryview keeps it.
            np.copyto(self._bytes[block_id].numpy(), np.frombuffer(source, dtype=np.uint8))

    def fill_blocks(self, block_ids: Sequence[int], fill: Callable[[Sequence[memoryview]], None]) -> None:
        """Replaces the bytes of blocks by what `fill` writes to a view for each: on a CPU of the block itself. All are
        in the pool when it returns. The caller holds them, and no step reads them yet."""
        if self._copies is None:
            fill([self._view(block_id) for block_id in block_ids])
            return
        arrived = np.empty((len(block_ids), self.block_bytes), dtype=np.uint8)
        fill([row.data for row in arrived])
        self._copies.write(block_ids, [row.data for row in arrived])

    def _view(self, block_id: int) -> memoryview:
        return self._bytes[block_id].numpy().data

    def close(self) -> None:
        """Closes the memfd. Peers keep what they have mapped; the memory is freed with the last mapping."""
        if self._memory is not None:
            self._memory.close()
