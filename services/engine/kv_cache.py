"""The KV pool's memory.

Owns: the bytes of all blocks and, on CPU, the memfd that holds them, so that a peer on the same host can map it.
Never: who holds which block (`block_pool`), or what is in it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_COPY_DTYPE = torch.uint8


@dataclass(frozen=True, slots=True)
class KVShape:
    """One block: [num_layers, 2 (key, value), block_size, num_kv_heads, head_dim] elements of dtype, contiguous."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def dimensions(self) -> tuple[int, int, int, int, int]:
        return self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim

    @property
    def block_bytes(self) -> int:
        elements = self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim
        return elements * self.dtype.itemsize


class KVCache:
    """[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], zero at first."""

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_bytes = shape.block_bytes
        self.device = device
        self.fd: int | None = None
        dimensions = (num_blocks, *shape.dimensions)
        if device.type == "cpu":
            self.fd = os.memfd_create("baton-kv")
            os.ftruncate(self.fd, num_blocks * self.block_bytes)
            # The tensors keep the mapping alive; pages become real when first written.
            mapping = mmap.mmap(self.fd, num_blocks * self.block_bytes)
            self._blocks = torch.frombuffer(mapping, dtype=shape.dtype).view(dimensions)
        else:
            self._blocks = torch.zeros(dimensions, dtype=shape.dtype, device=device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._bytes = self._blocks.view(num_blocks, -1).view(_COPY_DTYPE)  # [num_blocks, block_bytes]
        self._tokens = self._blocks.view(-1, shape.num_kv_heads * shape.head_dim)
        self._keys = [self._blocks[:, layer, 0] for layer in range(shape.num_layers)]
        self._values = [self._blocks[:, layer, 1] for layer in range(shape.num_layers)]

    def keys(self, layer: int) -> Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim], strided over the blocks."""
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        return self._values[layer]

    def rows(self, block_ids: Tensor, offsets: Tensor) -> Tensor:
        """Where each token's key and value go, for `write`: [num_layers, 2 * num_tokens], keys first.

        block_ids, offsets: [num_tokens] int64, the token's block and its place in it.
        """
        layers, _, size, _, _ = self.shape.dimensions
        key_rows = block_ids * (layers * 2 * size) + offsets
        both = torch.cat((key_rows, key_rows + size))
        return both + torch.arange(0, layers * 2 * size, 2 * size, device=both.device)[:, None]

    def write(self, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """One layer's new tokens. rows: [2 * num_tokens]; key, value: [num_tokens, num_kv_heads, head_dim]."""
        self._tokens.index_copy_(0, rows, torch.cat((key.flatten(1), value.flatten(1))))

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zeroes blocks about to be begun and not filled.

        They are read whole, under a mask, and a NaN left there by the last owner would survive the mask.
        """
        if block_ids:
            index = torch.tensor(block_ids, device=self.device)
            self._bytes.index_fill_(0, index, 0)

    def read_block(self, block_id: int) -> memoryview:
        """The block's bytes: on CPU the memory itself, read-only; elsewhere a copy."""
        data = self._bytes[block_id]
        return data.cpu().numpy().data.toreadonly()

    def copy_block(self, block_id: int, target: memoryview) -> None:
        """Writes the block's bytes to `target`. From a GPU on a stream of its own, beside the step that may run: what
        the block holds was synchronised before anyone was told of it."""
        with torch.cuda.stream(self._copies):  # of None: no effect
            torch.frombuffer(target, dtype=_COPY_DTYPE).copy_(self._bytes[block_id])

    def write_block(self, block_id: int, data: bytes | bytearray | memoryview) -> None:
        """Fills a block. The caller holds it, and no step reads it yet."""
        source = memoryview(data).cast("B")
        if source.nbytes != self.block_bytes:
            raise ValueError(f"{source.nbytes} bytes for a block of {self.block_bytes}")
        if self.device.type == "cpu":
            self._bytes[block_id].numpy().data[:] = source
        else:
            copy = torch.frombuffer(bytearray(source), dtype=_COPY_DTYPE)
            with torch.cuda.stream(self._copies):  # beside the step that may run, and complete before it returns
                self._bytes[block_id].copy_(copy)

    def close(self) -> None:
        """Closes the memfd. Peers keep what they have mapped; the memory goes with the last mapping."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
