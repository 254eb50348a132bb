"""The C kernels against torch and the plain modules. Skipped where they were not built (no compiler)."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from services.core.hashing import num_blocks_for
from services.engine.attention import choice, paged
from services.engine.attention.native import NativeAttention
from services.engine.attention.paged import Scoring, StepLayout
from services.engine.cpu.fast_paths import use_native_modules
from services.engine.cpu.native_modules import NativeGatedMLP, NativeRMSNorm
from services.engine.native import bindings
from services.engine.native.bindings import Kernels, kernels

CPU = torch.device("cpu")


@pytest.fixture
def native() -> Kernels:
    found = kernels()
    if found is None:
        pytest.skip("the kernels were not built here")
    return found


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (7, 1), (20, 4), (128, 128)])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 8), (16, 4), (80, 64), (64, 20), (256, 16)])
def test_attention_passes_the_check_at_load(
    native: Kernels, threads: int, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        paged.verify(NativeAttention(native), CPU, torch.bfloat16, heads, kv_heads, head_dim, block_size)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("heads", "head_dim"), [(129, 64), (4, 272), (4, 24)])
def test_what_the_kernel_cannot_hold_goes_elsewhere(native: Kernels, heads: int, head_dim: int) -> None:
    backend = choice.select(CPU, torch.bfloat16, heads, heads, head_dim, 16)
    assert not isinstance(backend, NativeAttention)


@pytest.mark.parametrize("seed", range(20))
def test_attention_on_random_batches(native: Kernels, seed: int) -> None:
    chance = random.Random(seed)
    heads, kv_heads = chance.choice(((6, 2), (3, 3), (5, 1)))
    window, softcap = chance.choice((None, 1, 20, 300)), chance.choice((None, 2.0))
    query_lens = [chance.choice((1, 1, 1, 5)) for _ in range(chance.randrange(1, 9))]
    context_lens = [length + chance.choice((0, 3, 90, 700)) for length in query_lens]
    counts = [num_blocks_for(length, 16) for length in context_lens]
    blocks = chance.sample(range(sum(counts) + 3), sum(counts))
    tables = [tuple(blocks[sum(counts[:row]) :][:count]) for row, count in enumerate(counts)]
    torch.manual_seed(seed)
    cache = torch.randn(sum(counts) + 3, 2, 2, 16, kv_heads, 64).bfloat16()
    # Whatever the last owner left behind the newest token must not be read.
    for table, length in zip(tables, context_lens, strict=True):
        if length % 16 and query_lens[context_lens.index(length)] == 1:
            cache[table[-1], :, :, length % 16 :] = torch.nan
    query = torch.randn(heads, sum(query_lens), 64).bfloat16().transpose(0, 1)  # as a model's layers give it
    if 5 in query_lens:
        cache = cache.nan_to_num()

    def attend(backend: paged.PagedAttention) -> Tensor:
        layout = StepLayout(tuple(tables), tuple(query_lens), tuple(context_lens))
        return backend(query, cache[:, 1, 0], cache[:, 1, 1], layout, Scoring(0.2, window, softcap))

    torch.testing.assert_close(attend(NativeAttention(native)), attend(paged.reference), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("kind", "offset"), [(LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)])
def test_norms_are_replaced_in_their_form(native: Kernels, kind: type[nn.Module], offset: float) -> None:
    norm = kind(48).bfloat16()
    nn.init.normal_(norm.weight)
    model = nn.Sequential(norm, nn.Identity())
    inputs = torch.randn(2, 50, 48).bfloat16() * 7
    with torch.inference_mode():
        expected = norm(inputs)
        assert use_native_modules(model) == (1, 0)
        assert isinstance(model[0], NativeRMSNorm)
        assert model[0].offset == offset
        torch.testing.assert_close(model(inputs), expected, atol=0.02, rtol=0.01)
        assert model(inputs[:, :0]).shape == (2, 0, 48)


def _mlp(activation: str) -> nn.Module:
    return LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=72, hidden_act=activation)).bfloat16()


def test_gated_mlps_are_replaced(native: Kernels) -> None:
    model = nn.Sequential(_mlp("silu"))
    inputs = torch.randn(3, 50, 32).bfloat16() * 20
    with torch.inference_mode():
        expected = model(inputs)
        assert use_native_modules(model) == (1, 0)
        assert isinstance(model[0], NativeGatedMLP)
        found = model(inputs)
        assert (found - expected).float().norm() < 0.01 * expected.float().norm()


def test_what_differs_stays(native: Kernels) -> None:
    class ShiftedRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) + 0.1

    model = nn.Sequential(_mlp("gelu"), ShiftedRMSNorm(8).bfloat16(), LlamaRMSNorm(8))  # the last is float32
    assert use_native_modules(model) == (0, 0)


@pytest.mark.parametrize(("tiles", "queries", "keys"), [(3, 7, 7), (2, 5, 90), (1, 3, 9000), (2, 1, 1)])
@pytest.mark.parametrize("window", [None, 1, 4, 8500])
def test_causal_softmax(native: Kernels, tiles: int, queries: int, keys: int, window: int | None) -> None:
    torch.manual_seed(0)
    scores = torch.randn(tiles, queries, keys).mul(3).bfloat16()
    last = keys - queries
    first = -queries if window is None else last - window + 1
    place = torch.arange(keys) - torch.arange(queries)[:, None]
    expected = scores.float().masked_fill((place < first) | (place > last), -torch.inf).softmax(-1).bfloat16()
    torch.testing.assert_close(native.causal_softmax(scores, first, last), expected, atol=1e-3, rtol=1e-2)


def test_without_a_compiler_nothing_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = SimpleNamespace(name="avx2", library=tmp_path / "missing.so")
    monkeypatch.setattr(bindings, "usable", lambda: (missing,))
    kernels.cache_clear()
    try:
        assert kernels() is None
        assert use_native_modules(nn.Sequential(LlamaRMSNorm(8).bfloat16())) == (0, 0)
        assert not isinstance(choice.select(CPU, torch.bfloat16, 4, 2, 16, 16), NativeAttention)
        missing.library.write_bytes(b"not a library")
        kernels.cache_clear()
        assert kernels() is None
    finally:
        monkeypatch.undo()
        kernels.cache_clear()


def test_a_compiler_that_fails_is_told(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "services.engine.native.build"],
        env={"CC": "false", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "runs without its CPU kernels" in result.stderr
