"""Computes paged attention on CUDA with PyTorch's variable-length flash attention (Dao et al., arXiv 2205.14135).

There are two forms. One passes block tables, and needs a version of flash attention that takes blocks of this size; the
other gathers the keys first, and works with any version. `choice.select` tries them in that order. Flash attention does
not take float32, and layers with a softcap are computed by products. `VarlenDecode` is the first form for CUDA graphs.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from services.engine.attention import dense
from services.engine.attention.decode import DecodeTables, GatheredDecode
from services.engine.attention.paged import Scoring, StepLayout


def activate() -> None:
    """Makes torch use FlashAttention-3 (arXiv 2407.08608) if its package is installed, since that version takes block
    tables with any block size."""
    if importlib.util.find_spec("flash_attn_interface") is not None:
        activate_flash_attention_impl("FA3")


@dataclass(frozen=True, slots=True)
class VarlenExtents:
    """Keeps a step's lengths and blocks in the form that the kernel takes: int32 tensors on the device."""

    query_starts: Tensor
    """Row of each sequence's first query, then the number of rows: [num_sequences + 1]."""
    key_starts: Tensor
    """Row of each sequence's first gathered key, then the number of keys: [num_sequences + 1]."""
    context_lens: Tensor
    """Tokens of each sequence: [num_sequences]."""
    tables: Tensor
    """Blocks of each sequence: [num_sequences, most blocks]. It is padded with block 0, which is beyond the lengths and
    not read."""


class VarlenAttention:
    """Computes attention as `paged.PagedAttention` defines it. `over_tables` chooses the form that passes block
    tables."""

    def __init__(self, over_tables: bool) -> None:
        self.over_tables = over_tables

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: StepLayout, scoring: Scoring
    ) -> Tensor:
        if scoring.softcap is not None:
            return dense.paged_attention(query, key_cache, value_cache, layout, scoring)
        device = query.device
        extents = layout.derived("varlen", lambda: _extents(layout, device))
        key, value = key_cache, value_cache
        if not self.over_tables:
            block_size = key_cache.shape[1]
            blocks, offsets = layout.derived("tokens", lambda: _tokens(layout, block_size, device))
            key, value = key_cache[blocks, offsets], value_cache[blocks, offsets]
        return _attend(
            query,
            key,
            value,
            extents.query_starts,
            None if self.over_tables else extents.key_starts,
            max(layout.query_lens),
            max(layout.context_lens),
            DecodeTables(extents.tables, extents.context_lens) if self.over_tables else None,
            scoring,
        )


class VarlenDecode:
    """Computes attention as `decode.DecodeAttention` defines it, over block tables."""

    gathers = False

    def __init__(self) -> None:
        self._with_softcap = GatheredDecode()

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, tables: DecodeTables, scoring: Scoring
    ) -> Tensor:
        if scoring.softcap is not None:
            return self._with_softcap(query, key_cache, value_cache, tables, scoring)
        num_sequences, width = tables.blocks.shape
        starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=query.device)
        longest = width * key_cache.shape[1]  # a graph keeps this number, so it is the most that tables can have
        return _attend(query, key_cache, value_cache, starts, None, 1, longest, tables, scoring)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor | None,
    longest_query: int,
    longest_context: int,
    tables: DecodeTables | None,
    scoring: Scoring,
) -> Tensor:
    """Calls flash attention over gathered keys, which `key_starts` divides, or over blocks, which `tables` lists."""
    window = scoring.sliding_window
    mixed = varlen_attn(
        query,
        key,
        value,
        query_starts,
        key_starts,
        longest_query,
        longest_context,
        scale=scoring.scale,
        # The window is (tokens before the query's own, tokens after it); -1 is no limit, so (-1, 0) is causal.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[-2],
        seqused_k=None if tables is None else tables.context_lens,
        block_table=None if tables is None else tables.blocks,
    )
    assert isinstance(mixed, Tensor)
    return mixed


def _extents(layout: StepLayout, device: torch.device) -> VarlenExtents:
    width = max(len(table) for table in layout.block_tables)
    tables = [[*table, *[0] * (width - len(table))] for table in layout.block_tables]

    def on_device(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return VarlenExtents(
        query_starts=on_device([0, *accumulate(layout.query_lens)]),
        key_starts=on_device([0, *accumulate(layout.context_lens)]),
        context_lens=on_device(list(layout.context_lens)),
        tables=on_device(tables),
    )


def _tokens(layout: StepLayout, block_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns each token's block and place in it, one sequence after the other: [sum of context_lens] each."""
    blocks, offsets = [], []
    for table, _, context_len in layout.sequences():
        positions = torch.arange(context_len)
        blocks.append(torch.tensor(table)[positions // block_size])
        offsets.append(positions % block_size)
    return torch.cat(blocks).to(device), torch.cat(offsets).to(device)
