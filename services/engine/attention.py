"""Attention over the paged pool: one signature, several backends, and the plain reference.

`dense` (any device) gathers and multiplies; `varlen` (CUDA) calls flash attention; `native` (CPU, bfloat16) reads the
blocks where they lie. All must agree with `reference`, and `select` shows that they do before it hands one out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from services.core.hashing import num_blocks_for

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class Memo:
    """What a step's layers share (index tensors, masks): made by the first that needs it."""

    entries: dict[Hashable, Any] = field(default_factory=dict)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self.entries:
            self.entries[key] = make()
        return self.entries[key]


class PagedAttention(Protocol):
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
        """Causal attention of each sequence's newest tokens over all its tokens, itself included.

        query: [num_tokens, num_heads, head_dim], sequences one after the other, `query_lens` tokens each.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], the new tokens already written.
        block_tables: per sequence, the blocks of its `context_lens` tokens.
        scale multiplies the scores; softcap c makes them c * tanh(score / c); sliding_window w lets a token see the
        last w tokens only. memo: fresh for every step.
        Returns [num_tokens, num_heads, head_dim].
        """
        ...


def reference(
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
    """The definition, in float32, one sequence at a time."""
    group = query.shape[1] // key_cache.shape[2]
    outputs = []
    start = 0
    for table, query_len, context_len in zip(block_tables, query_lens, context_lens, strict=True):
        blocks = torch.tensor(table, device=query.device)
        queries = query[start : start + query_len].float()
        keys = key_cache[blocks].flatten(0, 1)[:context_len].float().repeat_interleave(group, 1)
        values = value_cache[blocks].flatten(0, 1)[:context_len].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = distances(query_len, context_len, query.device)
        hidden = distance < 0 if sliding_window is None else (distance < 0) | (distance >= sliding_window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype))
        start += query_len
    return torch.cat(outputs)


def distances(query_len: int, context_len: int, device: torch.device) -> Tensor:
    """[query_len, context_len]: how far each key lies before each of the last query_len tokens; negative: after it."""
    positions = torch.arange(context_len - query_len, context_len, device=device)
    return positions[:, None] - torch.arange(context_len, device=device)


def select(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> PagedAttention:
    """The fastest backend that agrees with the reference here."""
    for name, backend in _candidates(device, dtype):
        try:
            verify(backend, device, dtype, num_heads, num_kv_heads, head_dim, block_size)
        except (RuntimeError, ValueError, AssertionError) as error:
            logger.info("attention backend %s is not used: %s", name, error)
            continue
        logger.info("attention backend %s", name)
        return backend
    return reference


def _candidates(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, PagedAttention]]:
    # Imported here: they import this module.
    from services.engine import attention_dense, attention_varlen
    from services.engine.native.attention import NativeAttention
    from services.engine.native.bindings import kernels

    if device.type == "cuda":
        attention_varlen.activate()
        yield "varlen over block tables", attention_varlen.VarlenAttention(over_tables=True)
        yield "varlen over gathered keys", attention_varlen.VarlenAttention(over_tables=False)
    native = kernels() if device.type == "cpu" and dtype == torch.bfloat16 else None
    if native is not None:
        yield "native", NativeAttention(native)
    yield "dense", attention_dense.paged_attention


def verify(
    backend: PagedAttention,
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    """Raises AssertionError unless a mixed batch (decodes and chunks, windowed and not) matches the reference."""
    query_lens, context_lens = (1, 1, 1, 2, 19, 7), (1, 40, 17, 16, 19, 50)
    tables, next_block = [], 0
    for context_len in context_lens:
        count = num_blocks_for(context_len, block_size)
        tables.append(tuple(range(next_block + count - 1, next_block - 1, -1)))
        next_block += count
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(next_block, 2, block_size, num_kv_heads, head_dim, generator=generator).to(device, dtype)
    query = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(device, dtype)
    tolerance = 2e-4 if dtype == torch.float32 else 4e-2
    for window in (None, 11):
        found, expected = (
            attend(
                query,
                cache[:, 0],
                cache[:, 1],
                tables,
                query_lens,
                context_lens,
                scale=head_dim**-0.5,
                sliding_window=window,
                memo=Memo(),
            ).float()
            for attend in (backend, reference)
        )
        error = (found - expected).abs().max().item()
        assert error < tolerance, f"differs from the reference by {error:.2e} (window {window})"
