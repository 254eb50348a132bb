"""Holds the memory of the block pool.

Owns: the bytes of all blocks and, on a CPU, the memfd that holds them, so that a peer on the same host can map it.
Never: who holds which block (`services.kv.pool`), or what is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.core.sealed_memory import SealedMemory
from services.kv.layout import BlockShape, block_bytes, block_shape

_COPY_DTYPE = torch.uint8


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of one block: [num_layers, 2 (key, value), block_size, num_kv_heads, head_dim] elements of `dtype`,
    contiguous."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def dimensions(self) -> BlockShape:
        return block_shape(self.num_layers, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.dimensions, self.dtype.itemsize)


class KVCache:
    """The tensor of all blocks: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], zero at first."""

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
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._bytes = self._blocks.view(num_blocks, -1).view(_COPY_DTYPE)  # [num_blocks, block_bytes]
        self._tokens = self._blocks.view(-1, shape.num_kv_heads * shape.head_dim)
        self._keys = [self._blocks[:, layer, 0] for layer in range(shape.num_layers)]
        self._values = [self._blocks[:, layer, 1] for layer in range(shape.num_layers)]

    @property
    def fd(self) -> int | None:
        """Returns the memfd, or None if no peer can map it: on a GPU, where it cannot be sealed, and after `close`."""
        return None if self._memory is None else self._memory.fd

    def keys(self, layer: int) -> Tensor:
        """Returns one layer's keys in all blocks: [num_blocks, block_size, num_kv_heads, head_dim], a strided view."""
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        """Returns one layer's values, as `keys` does its keys."""
        return self._values[layer]

    def rows(self, block_ids: Tensor, offsets: Tensor) -> Tensor:
        """Returns the rows to which `write` puts each token's key and value: [num_layers, 2 * num_tokens], keys first.

        block_ids, offsets: [num_tokens] int64, each token's block and its place in it.
        """
        layers, _, size, _, _ = self.shape.dimensions
        key_rows = block_ids * (layers * 2 * size) + offsets
        both = torch.cat((key_rows, key_rows + size))
        return both + torch.arange(0, layers * 2 * size, 2 * size, device=both.device)[:, None]

    def write(self, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Writes the KV of new tokens in one layer. rows: that layer's row of `rows`, [2 * num_tokens]; key, value:
        [num_tokens, num_kv_heads, head_dim]."""
        self._tokens.index_copy_(0, rows, torch.cat((key.flatten(1), value.flatten(1))))

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zeroes blocks that the next step begins and does not fill.

        Attention reads whole blocks under a mask, and a NaN that the last owner left there would get through the mask.
        """
        if block_ids:
            index = torch.tensor(block_ids, device=self.device)
            self._bytes.index_fill_(0, index, 0)

    def read_block(self, block_id: int) -> memoryview:
        """Returns the block's bytes: on a CPU the memory itself, read-only; elsewhere a copy (see `copy_block`)."""
        with torch.cuda.stream(self._copies):
            data = self._bytes[block_id].cpu()
        return data.numpy().data.toreadonly()

    def copy_block(self, block_id: int, target: memoryview) -> None:
        """Copies the block's bytes to `target`. A GPU copies on a CUDA stream of its own, while a step may run: a block
        is announced only after the step that wrote it has completed on the device."""
        with torch.cuda.stream(self._copies):  # None: no effect
            torch.frombuffer(target, dtype=_COPY_DTYPE).copy_(self._bytes[block_id])

    def write_block(self, block_id: int, data: bytes | bytearray | memoryview) -> None:
        """Writes all bytes of a block. The caller holds the block, and no step reads it yet. Raises ValueError if
        `data` has another size."""
        source = memoryview(data).cast("B")
        if source.nbytes != self.block_bytes:
            raise ValueError(f"{source.nbytes} bytes for a block of {self.block_bytes}")
        if self.device.type == "cpu":
            self._bytes[block_id].numpy().data[:] = source
        else:
            copy = torch.frombuffer(bytearray(source), dtype=_COPY_DTYPE)
            with torch.cuda.stream(self._copies):  # while a step may run; the copy completes before this returns
                self._bytes[block_id].copy_(copy)

    def close(self) -> None:
        """Closes the memfd. Peers keep what they have mapped; the memory is freed with the last mapping."""
        if self._memory is not None:
            self._memory.close()
