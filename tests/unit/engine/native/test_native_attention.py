"""Tests the attention kernel against the plain reference: each instruction set, each dtype, chunks and decodes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from services.core.hashing import num_blocks_for
from services.engine.attention import choice, dense, paged
from services.engine.attention.int8_rows import packed
from services.engine.attention.native import NativeAttention
from services.engine.attention.paged import Scoring, StepLayout
from services.engine.native.bindings import DTYPES, Kernels
from tests.support.examples import combinations

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
BLOCK_SIZE = 16


NUM_HEADS = [(9, 3), (4, 4), (7, 1), (20, 4), (71, 1), (128, 128)]
"""Of queries, and of keys and values."""
BLOCKS = [(64, 16), (256, 16), (128, 8), (80, 64), (64, 20), (16, 4)]
"""The size of a head, and how many tokens a block has."""


@pytest.mark.parametrize(
    ("dtype", "num_heads", "block", "over_int8"), combinations(tuple(DTYPES), NUM_HEADS, BLOCKS, [False, True])
)
def test_it_passes_the_check_at_load(
    native: Kernels, dtype: torch.dtype, num_heads: tuple[int, int], block: tuple[int, int], over_int8: bool
) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            paged.verify(NativeAttention(native), CPU, dtype, *num_heads, *block, over_int8=over_int8)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("over_int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_chosen_for_each_dtype(native: Kernels, dtype: torch.dtype, over_int8: bool) -> None:
    name, backend = choice.select(CPU, dtype, 6, 2, 64, 16, over_int8=over_int8)
    assert isinstance(backend, NativeAttention)
    assert name == "native"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(129, 64), (4, 272), (4, 24)])
def test_what_the_kernel_cannot_hold_goes_elsewhere(
    native: Kernels, dtype: torch.dtype, heads: int, head_dim: int
) -> None:
    _, backend = choice.select(CPU, dtype, heads, heads, head_dim, 16)
    assert not isinstance(backend, NativeAttention)


class Batch:
    """Keeps random sequences in blocks that lie anywhere. Whatever the last owner left behind the
    newest token is NaN."""

    def __init__(self, seed: int, dtype: torch.dtype, *, over_int8: bool = False) -> None:
        chance = random.Random(seed)
        heads, kv_heads = chance.choice(((6, 2), (3, 3), (5, 1)))
        query_lens = [chance.choice((1, 1, 1, 2, 5, 100)) for _ in range(chance.randrange(1, 9))]
        context_lens = [length + chance.choice((0, 3, 90, 700)) for length in query_lens]
        counts = [num_blocks_for(length, BLOCK_SIZE) for length in context_lens]
        blocks = chance.sample(range(sum(counts) + 3), sum(counts))
        tables = [tuple(blocks[sum(counts[:row]) :][:count]) for row, count in enumerate(counts)]
        torch.manual_seed(seed)
        cache = torch.randn(sum(counts) + 3, 2, 2, BLOCK_SIZE, kv_heads, 64).to(dtype)
        for table, length in zip(tables, context_lens, strict=True):
            if length % BLOCK_SIZE:
                cache[table[-1], :, :, length % BLOCK_SIZE :] = torch.nan
        cache = packed(cache) if over_int8 else cache
        self.scoring = Scoring(0.2, chance.choice((None, 1, 20, 300)), chance.choice((None, 2.0)))
        self.query = torch.randn(heads, sum(query_lens), 64).to(dtype).transpose(0, 1)  # as a model's layers give it
        self.keys, self.values = cache[:, 1, 0], cache[:, 1, 1]
        self._lengths = tuple(tables), tuple(query_lens), tuple(context_lens)

    def attend(self, backend: paged.PagedAttention) -> Tensor:
        return backend(self.query, self.keys, self.values, StepLayout(*self._lengths), self.scoring)


@pytest.mark.parametrize("seed", range(24))
def test_random_batches(native: Kernels, seed: int) -> None:
    """Each type of elements, over each kind of rows, has four of them."""
    dtype, over_int8 = tuple(DTYPES)[seed % 3], seed % 2 == 1
    batch = Batch(seed, dtype, over_int8=over_int8)
    found, expected = batch.attend(NativeAttention(native)), batch.attend(paged.reference)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("seed", range(10))
def test_chunks_may_go_to_amx(native: Kernels, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(dense, "has_amx", lambda: True)  # which products, not which instructions
    batch = Batch(seed, torch.bfloat16)
    batch.keys.nan_to_num_(), batch.values.nan_to_num_()  # `dense` reads whole blocks
    found, expected = batch.attend(NativeAttention(native)), batch.attend(paged.reference)
    torch.testing.assert_close(found, expected, atol=4e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(native: Kernels, dtype: torch.dtype) -> None:
    """A softmax without its largest score would divide infinity by infinity."""
    cache = torch.randn(8, 2, BLOCK_SIZE, 1, 16).to(dtype)
    query = torch.randn(41, 2, 16).to(dtype)
    layout = StepLayout(((0, 1, 2), (3, 4, 5, 6, 7)), (40, 1), (47, 80))
    scoring = Scoring(200.0)
    found, expected = (
        attend(query, cache[:, 0], cache[:, 1], layout, scoring)
        for attend in (NativeAttention(native), paged.reference)
    )
    assert found.isfinite().all()
    # At this scale a rounding of a score changes weights by more than a rounding.
    torch.testing.assert_close(found, expected, atol=5e-2, rtol=5e-2)
