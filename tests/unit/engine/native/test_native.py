"""The C kernels against torch and the plain modules. Skipped where they were not built (no compiler)."""

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
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from services.engine.attention import choice
from services.engine.attention.native import NativeAttention
from services.engine.cpu.fast_paths import use_native_modules
from services.engine.cpu.native_modules import NativeGatedMLP, NativeRMSNorm
from services.engine.native import bindings
from services.engine.native.bindings import Kernels, kernels

CPU = torch.device("cpu")


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


def test_without_a_compiler_nothing_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = SimpleNamespace(name="avx2", shared_object=tmp_path / "missing.so")
    monkeypatch.setattr(bindings, "usable", lambda: (missing,))
    kernels.cache_clear()
    try:
        assert kernels() is None
        assert use_native_modules(nn.Sequential(LlamaRMSNorm(8).bfloat16())) == (0, 0)
        assert not isinstance(choice.select(CPU, torch.bfloat16, 4, 2, 16, 16), NativeAttention)
        missing.shared_object.write_bytes(b"not a library")
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
