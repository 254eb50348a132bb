"""Paged attention with the C kernel for decodes. Chunks go to `attention_dense`: its products are faster there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine import attention_dense
from services.engine.attention import Memo
from services.engine.native.bindings import MAX_HEAD_DIM, MAX_HEADS, DecodeArguments, Kernels


@dataclass(frozen=True, slots=True)
class Split:
    """A step's sequences: decodes as the kernel takes them, and which of the others are chunks."""

    num_decodes: int
    extents: Tensor
    """[3, num_decodes] int64: row in the step, first and end of the visible tokens."""
    tables: Tensor
    """[num_decodes, most blocks] int64, padded with 0, which the extents hide."""
    chunks: tuple[int, ...]
    chunk_rows: Tensor | slice
    """Their rows in the step, one chunk after the other."""


class NativeAttention:
    """An `attention.PagedAttention` for bfloat16 on CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        memo: Memo,
    ) -> Tensor:
        head_dim = key_cache.shape[-1]
        if query.shape[1] > MAX_HEADS or head_dim > MAX_HEAD_DIM or head_dim % 16:
            raise ValueError(f"heads {query.shape[1]} x {head_dim}: not within the kernel's limits")

        def make_split() -> Split:
            return _split(block_tables, query_lens, context_lens, sliding_window)

        split = memo.get(("native", sliding_window), make_split)
        output = torch.empty(query.shape, dtype=query.dtype)
        if split.num_decodes:
            self._decode(query, key_cache, value_cache, output, split, scale, softcap or 0.0)
        if split.chunks:
            output[split.chunk_rows] = attention_dense.paged_attention(
                query[split.chunk_rows],
                key_cache,
                value_cache,
                [block_tables[i] for i in split.chunks],
                [query_lens[i] for i in split.chunks],
                [context_lens[i] for i in split.chunks],
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
                memo=memo,
                causal_softmax=self._kernels.causal_softmax,
            )
        return output

    def _decode(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        output: Tensor,
        split: Split,
        scale: float,
        softcap: float,
    ) -> None:
        query = query if query.stride(2) == 1 else query.contiguous()
        block_stride, token_stride, _, _ = key_cache.stride()
        extents = split.extents.data_ptr()
        row_bytes = split.extents.stride(0) * split.extents.itemsize
        self._kernels.decode_attention(
            DecodeArguments(
                query.data_ptr(),
                key_cache.data_ptr(),
                value_cache.data_ptr(),
                output.data_ptr(),
                extents,
                split.tables.data_ptr(),
                extents + row_bytes,
                extents + 2 * row_bytes,
                split.num_decodes,
                split.tables.shape[1],
                query.shape[1],
                key_cache.shape[2],
                key_cache.shape[3],
                key_cache.shape[1],
                query.stride(0),
                query.stride(1),
                block_stride,
                token_stride,
                scale,
                softcap,
                ctypes.c_int(torch.get_num_threads()),
            )
        )


def _split(
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    sliding_window: int | None,
) -> Split:
    decodes, tables, chunks = [], [], []
    chunk_rows: list[int] = []
    row = 0
    for i, (table, query_len, context_len) in enumerate(zip(block_tables, query_lens, context_lens, strict=True)):
        if query_len == 1:
            first = 0 if sliding_window is None else max(0, context_len - sliding_window)
            decodes.append((row, first, context_len))
            tables.append(table)
        else:
            chunks.append(i)
            chunk_rows += range(row, row + query_len)
        row += query_len
    width = max(map(len, tables), default=0)
    padded = [[*table, *[0] * (width - len(table))] for table in tables]
    return Split(
        num_decodes=len(decodes),
        extents=torch.tensor(decodes, dtype=torch.int64).reshape(-1, 3).t().contiguous(),
        tables=torch.tensor(padded, dtype=torch.int64),
        chunks=tuple(chunks),
        chunk_rows=torch.tensor(chunk_rows) if decodes else slice(None),
    )
