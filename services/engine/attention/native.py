"""Computes paged attention with the C kernel for decodes; chunks go to `dense`, whose matrix products are faster.

Owns: the division of a step into decodes and chunks, and the kernel's arguments. Never: the kernel (`engine.native`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.attention import dense
from services.engine.attention.paged import Scoring, StepLayout
from services.engine.native.bindings import MAX_HEAD_DIM, MAX_HEADS, DecodeArguments, Kernels


@dataclass(frozen=True, slots=True)
class Split:
    """Describes a step's sequences, divided into decodes, in the form that the kernel takes, and chunks."""

    num_decodes: int
    """Sequences with one new token."""
    extents: Tensor
    """Row in the step, and start and end of the visible tokens, of each decode: [3, num_decodes] int64."""
    tables: Tensor
    """Blocks of each decode: [num_decodes, most blocks] int64, padded with 0, which the extents hide."""
    chunks: StepLayout | None
    """Layout of the chunks alone; None if there are none."""
    chunk_rows: Tensor | slice
    """Rows of the chunks in the step, one chunk after the other."""


class NativeAttention:
    """Computes attention in bfloat16 on CPUs, as `paged.PagedAttention` defines it.

    A call raises ValueError for more heads or larger ones than the kernel takes, and for a head dimension that is not a
    multiple of 16.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: StepLayout, scoring: Scoring
    ) -> Tensor:
        head_dim = key_cache.shape[-1]
        if query.shape[1] > MAX_HEADS or head_dim > MAX_HEAD_DIM or head_dim % 16:
            raise ValueError(f"the kernel does not take {query.shape[1]} heads of {head_dim}")
        window = scoring.sliding_window
        split = layout.derived(("native", window), lambda: _split(layout, window))
        output = torch.empty(query.shape, dtype=query.dtype)
        if split.num_decodes:
            self._decode(query, key_cache, value_cache, output, split, scoring)
        if split.chunks:
            rows, softmax = split.chunk_rows, self._kernels.causal_softmax
            output[rows] = dense.paged_attention(query[rows], key_cache, value_cache, split.chunks, scoring, softmax)
        return output

    def _decode(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor, split: Split, scoring: Scoring
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
                scoring.scale,
                scoring.softcap or 0.0,
                ctypes.c_int(torch.get_num_threads()),
            )
        )


def _split(layout: StepLayout, sliding_window: int | None) -> Split:
    decodes, tables = [], []
    chunks: list[int] = []
    chunk_rows: list[int] = []
    row = 0
    for i, (table, query_len, context_len) in enumerate(layout.sequences()):
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
        chunks=layout.only(chunks) if chunks else None,
        chunk_rows=torch.tensor(chunk_rows) if decodes else slice(None),
    )
