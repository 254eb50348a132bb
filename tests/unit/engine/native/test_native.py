"""Tests the C kernels against torch and the plain modules. It is skipped where they were not built (no compiler)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from services.engine.attention import choice
from services.engine.attention.native import NativeAttention
from services.engine.cpu.fast_paths import use_native_modules
from services.engine.cpu.native_modules import NativeGatedMLP, NativeRMSNorm
from services.engine.cpu.replacement import ROUNDINGS, relative_difference
from services.engine.native import bindings
from services.engine.native.bindings import DTYPES, Kernels, kernels

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [7, 48])
@pytest.mark.parametrize(("kind", "offset"), [(LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)])
def test_norms_are_replaced_in_their_form(
    native: Kernels, kind: type[nn.Module], offset: float, dim: int, dtype: torch.dtype
) -> None:
    norm = kind(dim).to(dtype)
    nn.init.normal_(norm.weight)
    model = nn.Sequential(norm, nn.Identity())
    inputs = torch.randn(2, 50, dim).to(dtype) * 7
    with torch.inference_mode():
        expected = norm(inputs)
        assert use_native_modules(model) == (1, 0)
        assert isinstance(model[0], NativeRMSNorm)
        assert model[0].offset == offset
        torch.testing.assert_close(model(inputs), expected, atol=2 * ROUNDINGS[dtype], rtol=ROUNDINGS[dtype])
        assert model(inputs[:, :0]).shape == (2, 0, dim)


def _mlp(activation: str, dtype: torch.dtype) -> nn.Module:
    return LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=72, hidden_act=activation)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_mlps_are_replaced(native: Kernels, dtype: torch.dtype) -> None:
    model = nn.Sequential(_mlp("silu", dtype))
    inputs = torch.randn(3, 50, 32).to(dtype) * 20
    with torch.inference_mode():
        expected = model(inputs)
        assert use_native_modules(model) == (1, 0)
        assert isinstance(model[0], NativeGatedMLP)
        assert relative_difference(model(inputs), expected) < ROUNDINGS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_differs_stays(native: Kernels, dtype: torch.dtype) -> None:
    class ShiftedRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) + 0.1

    assert use_native_modules(nn.Sequential(_mlp("gelu", dtype), ShiftedRMSNorm(8).to(dtype))) == (0, 0)


def test_norms_in_another_type_than_the_model_stay(native: Kernels) -> None:
    """They are given the model's type, which their kernel would take for their own."""
    assert use_native_modules(nn.Sequential(_mlp("gelu", torch.bfloat16), LlamaRMSNorm(8))) == (0, 0)


def test_no_parameters_no_kernels(native: Kernels) -> None:
    assert use_native_modules(nn.Sequential(nn.Identity())) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 20, 64])
def test_rotation_is_that_of_transformers(native: Kernels, dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(0)
    heads = torch.randn(1, 5, 3, head_dim).to(dtype)  # two that are rotated, one that is not
    angles = torch.rand(1, 5, head_dim // 2).repeat(1, 1, 2) * 6
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    query, key, value = heads.transpose(1, 2).split(1, dim=1)
    expected = torch.cat((*apply_rotary_pos_emb(query, key, cosines, sines), value), dim=1).transpose(1, 2)
    native.rotate(heads.view(5, -1), 2, cosines, sines)
    if dtype == torch.float32:
        torch.testing.assert_close(heads, expected, atol=1e-6, rtol=1e-6)
    else:  # each product and sum is rounded where transformers rounds it
        assert torch.equal(heads, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_rounded_before_their_norm(native: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sums, more, weight = torch.randn(5, 50).to(dtype), torch.randn(5, 50).to(dtype) * 9, torch.randn(50).to(dtype)
    expected = sums + more
    normed = native.add_rms_norm(sums, more, weight, 1e-5, 0.0)
    assert torch.equal(sums, expected)
    assert torch.equal(normed, native.rms_norm(expected, weight, 1e-5, 0.0))


@pytest.mark.parametrize("scale", [1e-7, 1e-4, 1.0, 3e4])
def test_float16_is_rounded_as_torch_rounds_it(native: Kernels, scale: float) -> None:
    """The numbers are small ones without a leading one, the largest, and those beyond, which are infinite."""
    torch.manual_seed(0)
    sums, more = (torch.randn(64, 50).mul(scale).clamp(-65504, 65504).half() for _ in range(2))
    expected = sums + more
    native.add_rms_norm(sums, more, torch.ones(50).half(), 1e-5, 0.0)
    assert torch.equal(sums, expected)


def test_without_a_compiler_nothing_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = SimpleNamespace(name="avx2", shared_object=tmp_path / "missing.so")
    monkeypatch.setattr(bindings, "usable", lambda: (missing,))
    kernels.cache_clear()
    try:
        assert kernels() is None
        assert use_native_modules(nn.Sequential(LlamaRMSNorm(8).bfloat16())) == (0, 0)
        assert not isinstance(choice.select(CPU, torch.bfloat16, 4, 2, 16, 16)[1], NativeAttention)
        missing.shared_object.write_bytes(b"not a library")
        kernels.cache_clear()
        assert kernels() is None
    finally:
        monkeypatch.undo()
        kernels.cache_clear()


@pytest.mark.process
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


@pytest.mark.process
@pytest.mark.parametrize("named", ["no-such-compiler", "no-such-compiler -O2"])
def test_a_compiler_that_is_not_there_is_told(tmp_path: Path, named: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "services.engine.native.build"],
        env={"CC": named, "PATH": str(tmp_path), "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0
    assert result.stdout.startswith("CC=no-such-compiler is not there, so no CPU kernels: ")
    assert not result.stderr
