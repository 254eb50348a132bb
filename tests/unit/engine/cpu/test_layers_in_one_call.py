"""Tests all decoder layers in one call of layers.c: outputs and the pool are those of one layer after the other, bit by
bit, in every type and on every instruction set of this machine; what the call does not know runs one by one."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config

from services.engine.attention import dense
from services.engine.attention.native import NativeAttention
from services.engine.cpu.fast_paths import use_fast_paths, use_native_modules
from services.engine.cpu.linear_plan import replace_modules
from services.engine.cpu.native_layers import NativeLayers, join_layers
from services.engine.cpu.packed_linear import NativeLinear
from services.engine.cpu.quantisation import quantise
from services.engine.model.inputs import flatten
from services.engine.model.kv_cache import KVCache, KVShape
from services.engine.model.paged_model import ModelShape, PagedModel
from services.engine.native.bindings import DTYPES, Kernels
from services.engine.schedule.sequence import SampleRow, SamplingParams, ScheduledSequence
from tests.unit.engine.cpu.test_native_layers import SIZES, model_of

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama with biases": LlamaConfig(**{**SIZES, "num_key_value_heads": 6}, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=5),
    "qwen2": Qwen2Config(**SIZES),
}
BLOCK_SIZE = 16
CPU = torch.device("cpu")


def part(seq_id: int, start: int, count: int) -> ScheduledSequence:
    """Returns a part of a sequence that has blocks 4 * seq_id ... 4 * seq_id + 3."""
    tokens = tuple((7 * seq_id + 3 * at) % 64 for at in range(start, start + count))
    blocks = tuple(range(4 * seq_id, 4 * seq_id + (start + count - 1) // BLOCK_SIZE + 1))
    return ScheduledSequence(seq_id, start, tokens, blocks, (SampleRow(0, SamplingParams()),))


STEPS = [
    (part(0, 0, 40), part(1, 0, 1)),  # chunks
    (part(0, 40, 1), part(1, 1, 20), part(2, 0, 3)),  # decodes beside chunks
    (part(0, 41, 1), part(1, 21, 1), part(2, 3, 1)),  # decodes
    (part(2, 4, 1),),
]


def packed(config: PretrainedConfig, dtype: torch.dtype, native: Kernels, quantization: str = "none") -> nn.Module:
    """Returns a model whose linear layers of whole layers are computed by linear.c or quantised.c."""
    model = model_of(config, dtype)
    quantise(model, quantization, Path())
    assert use_native_modules(model)[1] == 2
    replace_modules(model, lambda each: NativeLinear(each, native) if type(each) is nn.Linear else None)
    return model


@torch.inference_mode()
def run(model: nn.Module, native: Kernels, kv_dtype: torch.dtype) -> list[Tensor]:
    """Returns the logits of all steps, and then the pool's blocks."""
    kv_heads = model.config.num_key_value_heads
    shape = ModelShape(2, 6, kv_heads, 16, 64, 128, (), model.dtype)
    cache = KVCache(KVShape(2, kv_heads, 16, BLOCK_SIZE, kv_dtype), 12, CPU)
    try:
        paged = PagedModel(model, shape, NativeAttention(native))
        logits = [paged.forward(flatten(step, BLOCK_SIZE, CPU), cache) for step in STEPS]
        blocks = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in cache.read_blocks(range(12))]
        return [*logits, *blocks]
    finally:
        cache.close()


def calls_of(native: Kernels) -> list[torch.dtype]:
    """Returns a list to which each call of `native.layers` from now on adds its type."""
    calls: list[torch.dtype] = []
    original = native.layers

    def counted(dtype: torch.dtype, arguments: object) -> None:
        calls.append(dtype)
        original(dtype, arguments)  # type: ignore[arg-type]

    native.layers = counted  # type: ignore[method-assign]
    return calls


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_one_call_is_the_same_as_one_by_one(native: Kernels, name: str, dtype: torch.dtype) -> None:
    model = packed(CONFIGS[name], dtype, native)
    with patch.object(dense, "has_amx", lambda: False):
        expected = run(model, native, dtype)
        assert join_layers(model, native) == 2
        calls = calls_of(native)
        assert same(run(model, native, dtype), expected)
    assert calls == [dtype] * len(STEPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_one_call_by_quantised_weights(native: Kernels, quantization: str, dtype: torch.dtype) -> None:
    model = packed(CONFIGS["llama"], dtype, native, quantization)
    with patch.object(dense, "has_amx", lambda: False):
        expected = run(model, native, dtype)
        assert join_layers(model, native) == 2
        calls = calls_of(native)
        assert same(run(model, native, dtype), expected)
    assert calls


def test_another_type_of_kv_runs_one_by_one(native: Kernels) -> None:
    model = packed(CONFIGS["llama"], torch.float32, native)
    expected = run(model, native, torch.bfloat16)
    assert join_layers(model, native) == 2
    calls = calls_of(native)
    assert same(run(model, native, torch.bfloat16), expected)
    assert not calls


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_what_is_said_of_the_layers_is_what_the_type_of_kv_lets_them_do(native: Kernels, kv_dtype: torch.dtype) -> None:
    model = model_of(CONFIGS["llama"], torch.float32)
    quantise(model, "int8", Path())
    words = use_fast_paths(model, kv_dtype)
    calls = calls_of(native)
    run(model, native, kv_dtype)
    assert "2 whole layers" in words
    assert bool(calls) == ("(2 in one call)" in words) == (kv_dtype == torch.float32)


def test_chunks_that_onednn_multiplies_run_one_by_one(native: Kernels) -> None:
    model = packed(CONFIGS["llama"], torch.bfloat16, native)
    assert join_layers(model, native) == 2
    calls = calls_of(native)
    with patch.object(dense, "has_amx", lambda: True):
        run(model, native, torch.bfloat16)
    assert len(calls) == 2, "the two steps that only decode"


def test_layers_by_other_kernels_stay(native: Kernels) -> None:
    model = model_of(CONFIGS["llama"], torch.float32)
    assert use_native_modules(model)[1] == 2
    assert join_layers(model, native) == 0, "their linear layers are torch's"
    model = packed(CONFIGS["llama"], torch.float16, native, "int8")
    assert join_layers(model, native) == 0, "quantised.c takes no float16"


def test_layers_that_differ_in_one_call_stay(native: Kernels) -> None:
    model = packed(CONFIGS["llama"], torch.float32, native)
    original = NativeLayers.one_by_one
    with patch.object(NativeLayers, "one_by_one", lambda self, *args, **kwargs: original(self, *args, **kwargs) + 1):
        assert join_layers(model, native) == 0


def test_layers_that_run_in_another_order_stay(native: Kernels) -> None:
    """The model runs its layers backwards."""
    model = packed(CONFIGS["llama"], torch.float32, native)
    inner = model.get_submodule("model")
    original = inner.forward

    def backwards(*args: object, **kwargs: object) -> object:
        kept = inner.layers
        if len(kept) == 2:
            inner.layers = nn.ModuleList(reversed(list(kept)))
        try:
            return original(*args, **kwargs)
        finally:
            inner.layers = kept

    inner.forward = backwards  # type: ignore[method-assign]
    assert join_layers(model, native) == 0
    assert len(inner.layers) == 2  # type: ignore[arg-type]
