"""Defines attention over the paged pool: its signature, a plain reference, and the check of a backend against it.

It follows PagedAttention (Kwon et al., arXiv 2309.06180), with grouped-query heads (GQA, arXiv 2305.13245). The
backends are `dense`, `varlen` and `native`; `choice` chooses one.
Owns: the definition and `StepLayout`. Never: how a backend computes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from services.core.hashing import num_blocks_for
from services.engine.attention.int8_rows import as_numbers, packed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Describes where a step's tokens lie: in its rows, sequences one after the other without padding, and in the pool.
    All layers of the step share it."""

    block_tables: tuple[tuple[int, ...], ...]
    """Blocks of each sequence in the order of its tokens: [num_sequences] tuples, each with blocks for at least
    `context_lens` tokens."""
    query_lens: tuple[int, ...]
    """Tokens of each sequence that the step computes: its newest, with one row each. [num_sequences]."""
    context_lens: tuple[int, ...]
    """Tokens of each sequence whose KV is in the pool, including those that the step computes: [num_sequences]."""
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    """What `derived` has made, by key."""

    def sequences(self) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Yields each sequence's block table, query length and context length, in the order of the rows."""
        return zip(self.block_tables, self.query_lens, self.context_lens, strict=True)

    def only(self, indices: Sequence[int]) -> StepLayout:
        """Returns the layout of some of the sequences, given by index, whose rows then lie one after the other."""
        return StepLayout(
            block_tables=tuple(self.block_tables[i] for i in indices),
            query_lens=tuple(self.query_lens[i] for i in indices),
            context_lens=tuple(self.context_lens[i] for i in indices),
        )

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns what `make` returns, such as index tensors or masks. It is called for the first layer that asks for
        `key`, and the other layers share its result."""
        if key not in self._derived:
            self._derived[key] = make()
        made: T = self._derived[key]
        return made


@dataclass(frozen=True, slots=True)
class Scoring:
    """Describes how a layer turns products of queries and keys into scores."""

    scale: float
    """Factor of every product."""
    sliding_window: int | None = None
    """How many of the newest tokens a token sees, itself included. With None, it sees all before it."""
    softcap: float | None = None
    """Bound c of the scores, which become c * tanh(score / c) (Gemma 2, arXiv 2408.00118). With None, they stay as they
    are."""


class PagedAttention(Protocol):
    """Computes attention over the paged pool. Every backend is one."""

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: StepLayout, scoring: Scoring
    ) -> Tensor:
        """Computes attention of each sequence's newest tokens over themselves and all tokens before them.

        query: [num_tokens, num_heads, head_dim], the rows of `layout`.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim] in the type of `query`, or rows in 8
        bits, [num_blocks, block_size, num_kv_heads, head_dim + 4] (see `int8_rows`). The new tokens are written
        already.
        Returns [num_tokens, num_heads, head_dim]. May raise RuntimeError or ValueError for what it does not support.
        """
        ...


def reference(query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: StepLayout, scoring: Scoring) -> Tensor:
    """Computes paged attention by its definition, in float32 and one sequence at a time (see `PagedAttention`)."""
    group = query.shape[1] // key_cache.shape[2]
    window, softcap = scoring.sliding_window, scoring.softcap
    outputs = []
    start = 0
    for table, query_len, context_len in layout.sequences():
        blocks = torch.tensor(table, device=query.device)
        queries = query[start : start + query_len].float()
        keys, values = (
            as_numbers(cache[blocks].flatten(0, 1)[:context_len], torch.float32).float().repeat_interleave(group, 1)
            for cache in (key_cache, value_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scoring.scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = distances(query_len, context_len, query.device)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype))
        start += query_len
    return torch.cat(outputs)


def distances(query_len: int, context_len: int, device: torch.device) -> Tensor:
    """Returns how many positions each key lies before each of the last `query_len` tokens: [query_len, context_len].

    A negative number means that the key lies after the token.
    """
    positions = torch.arange(context_len - query_len, context_len, device=device)
    return positions[:, None] - torch.arange(context_len, device=device)


def verify(
    backend: PagedAttention,
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    *,
    over_int8: bool = False,
) -> None:
    """Raises AssertionError if the backend differs from the reference on a batch of decodes and chunks.

    over_int8: whether keys and values are kept in 8 bits; otherwise they are of `dtype`, as queries are. It compares
    them with and without a sliding window and a bound of the scores. One chunk is long enough that a backend which
    divides chunks into tiles has several, the last of them not whole. It raises what the backend raises, too.
    """
    query_lens, context_lens = (1, 1, 1, 2, 19, 7, 205), (1, 40, 17, 16, 19, 50, 243)
    tables, next_block = [], 0
    for context_len in context_lens:
        count = num_blocks_for(context_len, block_size)
        tables.append(tuple(range(next_block + count - 1, next_block - 1, -1)))
        next_block += count
    layout = StepLayout(tuple(tables), query_lens, context_lens)
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(next_block, 2, block_size, num_kv_heads, head_dim, generator=generator).to(device, dtype)
    cache = packed(cache) if over_int8 else cache
    query = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(device, dtype)
    tolerance = 2e-4 if dtype == torch.float32 else 4e-2
    for window, softcap in ((None, None), (11, None), (None, 2.0)):
        scoring = Scoring(head_dim**-0.5, sliding_window=window, softcap=softcap)
        found, expected = (
            attend(query, cache[:, 0], cache[:, 1], layout, scoring).float() for attend in (backend, reference)
        )
        error = (found - expected).abs().max().item()
        assert error < tolerance, f"differs from the reference by {error:.2e} (window {window}, bound {softcap})"
