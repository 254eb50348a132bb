"""Computes paged attention with the C kernel, which reads the blocks where they lie, for chunks and decodes alike.

The exception are chunks in bfloat16 on CPUs with AMX, which go to `dense`: oneDNN multiplies them with instructions
that the kernel does not use. Without AMX the kernel was faster in every type and shape that was tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, islice

import numpy
import torch
from torch import Tensor

from services.engine.attention import dense
from services.engine.attention.paged import Scoring, StepLayout
from services.engine.native.bindings import AttentionArguments, Kernels, attends_to


@dataclass(frozen=True, slots=True)
class NativeExtents:
    """Describes where a step's sequences lie, in the form that the kernel takes."""

    of_sequences: Tensor
    """First row, number of queries, number of tokens, and begin in `tables`, of each sequence: [4, num_sequences]
    int64."""
    tables: Tensor
    """Blocks of all sequences, one sequence after the other: int64."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """Holds the decodes of a step, or its chunks."""

    layout: StepLayout
    rows: Tensor
    """Their rows in the step."""
    is_chunks: bool


class NativeAttention:
    """Computes attention as `paged.PagedAttention` defines it, on CPUs in float32, bfloat16 and float16, over keys and
    values of the same type or in 8 bits. Raises ValueError for heads beyond the kernel's limits."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: StepLayout, scoring: Scoring
    ) -> Tensor:
        if not attends_to(*query.shape[1:]):
            raise ValueError(f"heads {query.shape[1]} x {query.shape[2]}: not within the kernel's limits")
        if self.reads_in_place(query.dtype, layout):
            return self._attend(query, key_cache, value_cache, layout, scoring)
        output = torch.empty(query.shape, dtype=query.dtype)
        for part in layout.derived("parts", lambda: _parts(layout)):
            attend = dense.paged_attention if part.is_chunks else self._attend
            output[part.rows] = attend(query[part.rows], key_cache, value_cache, part.layout, scoring)
        return output

    def reads_in_place(self, dtype: torch.dtype, layout: StepLayout) -> bool:
        """Returns whether the kernel computes all sequences of such a step."""
        return dtype != torch.bfloat16 or not dense.has_amx() or max(layout.query_lens) == 1

    def _attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: StepLayout, scoring: Scoring
    ) -> Tensor:
        output = torch.empty(query.shape, dtype=query.dtype)
        query = query if query.stride(2) == 1 else query.contiguous()
        arguments = arguments_of(query, key_cache, value_cache, output, layout, scoring)
        self._kernels.attention(query.dtype, arguments, over_int8=key_cache.dtype == torch.int8)
        return output


def arguments_of(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor, layout: StepLayout, scoring: Scoring
) -> AttentionArguments:
    """Returns the kernel's arguments. All tensors, and the layout, must be kept as long as they.

    query: [num_tokens, num_heads, head_dim], heads contiguous; output: the same shape, contiguous; caches: see
    `PagedAttention`.
    """
    extents = layout.derived("native", lambda: _extents(layout))
    rows, query_lens, context_lens, table_starts = (each.data_ptr() for each in extents.of_sequences)
    return AttentionArguments(
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        output.data_ptr(),
        rows,
        query_lens,
        context_lens,
        table_starts,
        extents.tables.data_ptr(),
        len(layout.query_lens),
        query.shape[1],
        key_cache.shape[2],
        query.shape[2],
        key_cache.shape[1],
        scoring.sliding_window or 0,
        query.stride(0),
        query.stride(1),
        *key_cache.stride()[:3],
        scoring.scale,
        scoring.softcap or 0.0,
        torch.get_num_threads(),
    )


def _parts(layout: StepLayout) -> list[StepPart]:
    of_row = torch.tensor(layout.query_lens).repeat_interleave(torch.tensor(layout.query_lens))
    parts = []
    for is_chunks in (False, True):
        indices = [i for i, query_len in enumerate(layout.query_lens) if (query_len > 1) == is_chunks]
        if indices:
            parts.append(StepPart(layout.only(indices), ((of_row > 1) == is_chunks).nonzero()[:, 0], is_chunks))
    return parts


def _extents(layout: StepLayout) -> NativeExtents:
    lengths = [len(table) for table in layout.block_tables]
    rows, starts = accumulate(layout.query_lens, initial=0), accumulate(lengths, initial=0)
    count = len(lengths)
    of_sequences = numpy.fromiter(
        chain(islice(rows, count), layout.query_lens, layout.context_lens, islice(starts, count)),
        numpy.int64,
        4 * count,
    )
    tables = numpy.fromiter(chain.from_iterable(layout.block_tables), numpy.int64, sum(lengths))
    return NativeExtents(torch.from_numpy(of_sequences).view(4, count), torch.from_numpy(tables))
