"""Tests the timing behind `--dtype auto`: any model that can be served can be timed, small ones
and those that are cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.engine.cpu import dtype_timing
from services.engine.model.kv_cache import KVCache, KVShape
from services.engine.model.weights import KV_DTYPES
from tests.support.models import FAMILIES, tiny_model

pytestmark = pytest.mark.long

BOTH = ("bfloat16", "float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_timed(family: str, tmp_path: Path) -> None:
    found = dtype_timing.time_ways(tiny_model(family, tmp_path, torch.bfloat16), "bfloat16", BOTH)
    assert list(found["timings"]) == ["bfloat16", "float32"]
    assert all(ms > 0 for timing in found["timings"].values() for ms in timing)
    assert found["rows"] in (8, 32, 128, 512)


@pytest.mark.parametrize("kv_dtype", ["auto", "float16", "int8"])
def test_the_kv_cache_is_of_the_type_that_workers_have(
    kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[KVShape] = []

    def noted(shape: KVShape, num_blocks: int, device: torch.device) -> KVCache:
        shapes.append(shape)
        return KVCache(shape, num_blocks, device)

    monkeypatch.setattr(dtype_timing, "KVCache", noted)
    dtype_timing.time_ways(tiny_model("llama", tmp_path, torch.bfloat16), "bfloat16", BOTH, kv_dtype)
    expected = [torch.bfloat16, torch.float32] if kv_dtype == "auto" else [KV_DTYPES[kv_dtype]] * 2
    assert [shape.dtype for shape in shapes] == expected


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_large_model_is_cut_to_some_layers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family, tmp_path, torch.bfloat16, num_hidden_layers=24, layer_types=None)
    whole = dtype_timing.time_ways(model, "bfloat16", BOTH)
    monkeypatch.setattr(dtype_timing, "_SAMPLE_PARAMETERS", 1)
    cut = dtype_timing.time_ways(model, "bfloat16", BOTH)
    assert (whole["layers"], cut["layers"]) == (24, 1)
