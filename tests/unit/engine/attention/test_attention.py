"""Backends against the plain reference, over shapes, windows, caps, and blocks in any order."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from services.core.hashing import num_blocks_for
from services.engine.attention import choice, dense, paged
from services.engine.attention.paged import Scoring, StepLayout

CPU = torch.device("cpu")
BLOCK_SIZE = 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (4, 1), (80, 80)])
@pytest.mark.parametrize("block_size", [4, 16])
def test_dense_passes_the_check_at_load(dtype: torch.dtype, heads: int, kv_heads: int, block_size: int) -> None:
    paged.verify(dense.paged_attention, CPU, dtype, heads, kv_heads, 16, block_size)


def test_select_takes_dense_on_a_cpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "kernels", lambda: None)
    assert choice.select(CPU, torch.float32, 4, 2, 16, 16) == ("dense", dense.paged_attention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 20, 300])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_amx", [False, True])
def test_random_batches(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    seed: int,
    has_amx: bool,
) -> None:
    monkeypatch.setattr(dense, "has_amx", lambda: has_amx)  # which products, not which instructions
    chance = random.Random(seed)
    query_lens = [1] * chance.randrange(12) + [chance.choice((2, 3, 40, 300)) for _ in range(chance.randrange(1, 4))]
    chance.shuffle(query_lens)
    context_lens = [length + chance.choice((0, 0, 1, 7, 90, 400)) for length in query_lens]
    counts = [num_blocks_for(length, BLOCK_SIZE) for length in context_lens]
    blocks = chance.sample(range(sum(counts) + 3), sum(counts))
    tables = [tuple(blocks[sum(counts[:row]) :][:count]) for row, count in enumerate(counts)]
    torch.manual_seed(seed)
    cache = torch.randn(sum(counts) + 3, 2, BLOCK_SIZE, 2, 16).to(dtype)
    query = torch.randn(sum(query_lens), 6, 16).to(dtype)
    for backend in (paged.reference, dense.paged_attention):
        layout = StepLayout(tuple(tables), tuple(query_lens), tuple(context_lens))
        found = [
            backend(query * layer, cache[:, 0], cache[:, 1], layout, Scoring(0.3, window, softcap))
            for layer in (1, 2)  # the second uses what the first derived
        ]
        if backend is paged.reference:
            expected = found
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 if dtype == torch.float32 else 4e-2, rtol=1e-5)


def test_verify_notices_a_wrong_backend() -> None:
    def off_by_one(
        query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: StepLayout, scoring: Scoring
    ) -> Tensor:
        window = None if scoring.sliding_window is None else scoring.sliding_window + 1
        scoring = dataclasses.replace(scoring, sliding_window=window)
        return paged.reference(query, key_cache, value_cache, layout, scoring)

    with pytest.raises(AssertionError, match="window 11"):
        paged.verify(off_by_one, CPU, torch.float32, 4, 2, 16, 16)


@pytest.mark.parametrize("wrong", ["bound", "last tile"])
def test_verify_notices_what_only_some_chunks_show(wrong: str) -> None:
    def backend(query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: StepLayout, scoring: Scoring) -> Tensor:
        if wrong == "bound":
            return paged.reference(query, key_cache, value_cache, layout, dataclasses.replace(scoring, softcap=None))
        found = paged.reference(query, key_cache, value_cache, layout, scoring)
        place = 0
        for query_len in layout.query_lens:
            found[place + query_len // 96 * 96 : place + query_len if query_len > 96 else place] = 0
            place += query_len
        return found

    with pytest.raises(AssertionError, match="differs from the reference"):
        paged.verify(backend, CPU, torch.float32, 4, 2, 16, 16)
