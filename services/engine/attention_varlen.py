"""Paged attention on CUDA through PyTorch's variable-length flash attention.

Two forms: over block tables, which takes a flash-attention version that accepts pages of our block size; and over
gathered keys, which any version does. `attention.select` tries them in that order. float32 is not for flash attention,
and soft-capping goes to `attention_dense`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from services.engine import attention_dense
from services.engine.attention import Memo


def activate() -> None:
    """Flash attention 3, where its package is installed: it takes block tables with any block size."""
    if importlib.util.find_spec("flash_attn_interface") is not None:
        activate_flash_attention_impl("FA3")


@dataclass(frozen=True, slots=True)
class Extents:
    """A step's lengths and blocks on the device, as the kernel takes them: int32."""

    query_starts: Tensor
    """[num_sequences + 1]"""
    key_starts: Tensor
    """[num_sequences + 1]"""
    context_lens: Tensor
    """[num_sequences]"""
    tables: Tensor
    """[num_sequences, most blocks], padded with block 0, which the lengths hide."""


class VarlenAttention:
    """An `attention.PagedAttention`."""

    def __init__(self, over_tables: bool) -> None:
        self._over_tables = over_tables

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
        if softcap is not None:
            return attention_dense.paged_attention(
                query,
                key_cache,
                value_cache,
                block_tables,
                query_lens,
                context_lens,
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
                memo=memo,
            )
        device = query.device
        extents = memo.get("varlen", lambda: _extents(block_tables, query_lens, context_lens, device))
        key, value = key_cache, value_cache
        if not self._over_tables:
            block_size = key_cache.shape[1]
            blocks, offsets = memo.get("tokens", lambda: _tokens(block_tables, context_lens, block_size, device))
            key, value = key_cache[blocks, offsets], value_cache[blocks, offsets]
        mixed = varlen_attn(
            query,
            key,
            value,
            extents.query_starts,
            None if self._over_tables else extents.key_starts,
            max(query_lens),
            max(context_lens),
            scale=scale,
            # The window counts tokens to the left of the query's own; -1 is no limit, and 0 to the right is causal.
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=query.shape[1] != key_cache.shape[2],
            seqused_k=extents.context_lens if self._over_tables else None,
            block_table=extents.tables if self._over_tables else None,
        )
        assert isinstance(mixed, Tensor)
        return mixed


def _extents(
    block_tables: Sequence[Sequence[int]], query_lens: Sequence[int], context_lens: Sequence[int], device: torch.device
) -> Extents:
    width = max(len(table) for table in block_tables)
    tables = [[*table, *[0] * (width - len(table))] for table in block_tables]

    def on_device(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Extents(
        query_starts=on_device([0, *accumulate(query_lens)]),
        key_starts=on_device([0, *accumulate(context_lens)]),
        context_lens=on_device(list(context_lens)),
        tables=on_device(tables),
    )


def _tokens(
    block_tables: Sequence[Sequence[int]], context_lens: Sequence[int], block_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(block, offset) of every visible token, sequences one after the other: [sum of context_lens] each."""
    blocks, offsets = [], []
    for table, context_len in zip(block_tables, context_lens, strict=True):
        positions = torch.arange(context_len)
        blocks.append(torch.tensor(table)[positions // block_size])
        offsets.append(positions % block_size)
    return torch.cat(blocks).to(device), torch.cat(offsets).to(device)
