"""Computes attention of one new token of each sequence, whose lengths and blocks are tensors on the device.

`paged.PagedAttention` takes them as Python numbers, which a CUDA graph would keep as they were when it was captured.
What is here reads no tensor on the host, makes none from numbers of the host, and has shapes that depend on no length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.engine.attention.paged import Scoring


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """Keeps the blocks and lengths of sequences with one new token each. All layers of the step share them."""

    blocks: Tensor
    """Blocks of each sequence in the order of its tokens: [num_sequences, width] int32. Those beyond its tokens may be
    any whose numbers are finite."""
    context_lens: Tensor
    """Tokens of each sequence whose KV is in the pool, the new one included: [num_sequences] int32."""


class DecodeAttention(Protocol):
    """Computes attention of decodes over the paged pool, in a form that a CUDA graph can capture."""

    @property
    def gathers(self) -> bool:
        """Returns whether it copies the keys and values of whole tables, however short the sequences are."""
        ...

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, tables: DecodeTables, scoring: Scoring
    ) -> Tensor:
        """Computes attention of each sequence's newest token over itself and all tokens before it.

        query: [num_sequences, num_heads, head_dim]. The caches and the result are as in `paged.PagedAttention`.
        """
        ...


class GatheredDecode:
    """Gathers the blocks of all tables and multiplies, on any device and with every feature."""

    gathers = True

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, tables: DecodeTables, scoring: Scoring
    ) -> Tensor:
        num_sequences, num_heads, head_dim = query.shape
        heads = key_cache.shape[2]
        keys, values = (
            cache.flatten(1).index_select(0, tables.blocks.flatten()).view(num_sequences, -1, heads, head_dim)
            for cache in (key_cache, value_cache)
        )
        grouped = query.reshape(num_sequences, heads, num_heads // heads, head_dim)
        scores = torch.matmul(grouped, keys.permute(0, 2, 3, 1)).float() * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        places, newest = torch.arange(keys.shape[1], device=query.device), tables.context_lens[:, None] - 1
        hidden = places > newest  # [num_sequences, keys]
        if scoring.sliding_window is not None:
            hidden |= places <= newest - scoring.sliding_window
        weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1).to(query.dtype)
        return torch.matmul(weights, values.transpose(1, 2)).reshape(query.shape)
