"""Tests how keys and values are kept in 8 bits: what rounding costs, which bytes come out, and attention over them."""

from __future__ import annotations

import pytest
import torch

from services.core.config import demand_kv_dtype
from services.core.errors import ConfigError
from services.engine.attention import choice, dense, paged
from services.engine.attention.int8_rows import as_numbers, pack, packed
from services.engine.model.kv_cache import KVCache, KVShape
from services.engine.native.bindings import DTYPES, Kernels
from services.kv.layout import Layout
from services.kv.regions import check_regions

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_moves_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    rows = (torch.randn(40, 3, 64) * torch.logspace(-3, 3, 40)[:, None, None]).to(dtype)
    found = as_numbers(packed(rows), torch.float32)
    half_a_step = rows.float().abs().amax(-1, keepdim=True) / 254
    assert ((found - rows.float()).abs() <= half_a_step * 1.0001).all()


def test_each_row_has_a_scale_of_its_own() -> None:
    rows = torch.tensor([[1.0, -2.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0], [100.0, 50.0, -100.0, 1.0]])
    found = packed(rows)
    assert found[:, :4].tolist() == [[64, -127, 32, 0], [0, 0, 0, 0], [127, 64, -127, 1]]
    assert as_numbers(found, torch.float32)[1].count_nonzero() == 0


def test_what_is_no_number_stays_so() -> None:
    rows = torch.tensor([[1.0, torch.nan, 2.0, 3.0], [1.0, torch.inf, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]])
    for pack_rows in (packed, pack):
        assert as_numbers(pack_rows(rows), torch.float32).isfinite().all(-1).tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [4, 24, 64, 80, 256])
def test_the_kernel_gives_the_same_bytes(native: Kernels, dtype: torch.dtype, head_dim: int) -> None:
    rows = (torch.randn(300, 3, head_dim) * 30 * torch.rand(300, 1, 1)).to(dtype)
    rows[0, 0] = 0
    assert native.pack_rows(rows).equal(packed(rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (4, 1), (80, 80)])
def test_dense_attention_over_them(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    paged.verify(dense.paged_attention, CPU, dtype, heads, kv_heads, 16, 16, over_int8=True)


def test_without_kernels_dense_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "kernels", lambda: None)
    assert choice.select(CPU, torch.float32, 4, 2, 16, 16, over_int8=True)[0] == "dense"


def test_a_block_holds_them_with_their_scales() -> None:
    layout = Layout("m", "w", "c", "int8", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4)
    cache = KVCache(KVShape(3, 2, 8, 4, torch.int8), 5, CPU)
    try:
        assert cache.block_bytes == layout.block_bytes == 3 * 2 * 4 * 2 * (8 + 4)
        check_regions(cache, layout.block_bytes)
        key, value = torch.randn(2, 2, 8).bfloat16(), torch.randn(2, 2, 8).bfloat16()
        cache.write(cache.rows(torch.tensor([4, 1]), torch.tensor([3, 0]))[2], key, value)
        assert cache.keys(2)[4, 3].equal(packed(key)[0])
        assert cache.values(2)[1, 0].equal(packed(value)[1])
        assert cache.keys(1).count_nonzero() == 0
    finally:
        cache.close()


def test_on_a_gpu_they_are_refused() -> None:
    demand_kv_dtype("int8", "cpu")
    demand_kv_dtype("bfloat16", "cuda:1")
    with pytest.raises(ConfigError, match="--kv-dtype: int8 works only on a CPU; give bfloat16 or auto"):
        demand_kv_dtype("int8", "cuda:1")
