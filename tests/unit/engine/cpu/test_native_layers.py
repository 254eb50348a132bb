"""Tests whole decoder layers in a dozen calls: they are the same as transformers' own, or left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from services.engine.cpu.decoder_layer import NativeDecoderLayer
from services.engine.cpu.fast_paths import use_native_modules
from services.engine.cpu.quantisation import quantise
from services.engine.cpu.replacement import ROUNDINGS, relative_difference
from services.engine.model.paged_model import attending, register_attention
from services.engine.native.bindings import DTYPES
from tests.support.examples import combinations

SIZES = {
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


TOLERANCE = {dtype: 2 * difference for dtype, difference in ROUNDINGS.items()}

pytestmark = pytest.mark.usefixtures("native")


class Attention:
    """Causal, over the step's own tokens; notes how it was asked."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        self.options.append({name: kwargs.get(name) for name in ("scaling", "sliding_window")})
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=kwargs["scaling"], enable_gqa=True
        )
        return mixed.transpose(1, 2)


def model_of(config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=register_attention(), dtype=dtype).eval()
    for parameter in model.parameters():  # biases and norms too
        nn.init.normal_(parameter, std=0.1)
    return model


@torch.inference_mode()
def run(model: nn.Module, num_tokens: int) -> tuple[Tensor, list[dict[str, Any]]]:
    attention = Attention()
    tokens = torch.arange(num_tokens)[None] % 64
    with attending(attention):
        logits = model(input_ids=tokens, position_ids=torch.arange(3, num_tokens + 3)[None], use_cache=False).logits
    return logits, attention.options


OF_LLAMAS_KIND: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama with biases": LlamaConfig(**{**SIZES, "num_key_value_heads": 6}, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=5),
    "qwen2": Qwen2Config(**SIZES),
}


@pytest.mark.parametrize(
    ("config", "num_tokens", "dtype"), combinations(tuple(OF_LLAMAS_KIND), [1, 7, 700], tuple(DTYPES))
)
def test_layers_of_llamas_kind_are_replaced(config: str, num_tokens: int, dtype: torch.dtype) -> None:
    model = model_of(OF_LLAMAS_KIND[config], dtype)
    expected, wanted = run(model, num_tokens)
    assert use_native_modules(model)[1] == 2
    found, options = run(model, num_tokens)
    assert options == wanted
    assert relative_difference(found, expected) < TOLERANCE[dtype]
    again, _ = run(model, num_tokens)
    assert torch.equal(found, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "config",
    [Qwen3Config(**SIZES), Gemma2Config(**SIZES, query_pre_attn_scalar=16), LlamaConfig(**SIZES, hidden_act="gelu")],
    ids=["norms of heads", "norms after", "another gate"],
)
def test_other_layers_stay(config: PretrainedConfig, dtype: torch.dtype) -> None:
    model = model_of(config, dtype)
    expected, _ = run(model, 7)
    assert use_native_modules(model)[1] == 0
    found, _ = run(model, 7)
    assert relative_difference(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_that_differs_stays(dtype: torch.dtype) -> None:
    """Its parts are those of Llama, what it does with them is not."""
    model = model_of(LlamaConfig(**SIZES), dtype)
    layer = model.get_submodule("model.layers.1")
    original = layer.forward
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs) * 1.1  # type: ignore[method-assign]
    assert use_native_modules(model)[1] == 1
    assert isinstance(model.get_submodule("model.layers.0"), NativeDecoderLayer)
    assert not isinstance(model.get_submodule("model.layers.1"), NativeDecoderLayer)


@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(each, marks=pytest.mark.long) for each in (torch.bfloat16, torch.float16))]
)
def test_a_rounding_that_falls_the_other_way_keeps_no_layer_from_being_replaced(dtype: torch.dtype) -> None:
    """Quantised layers round their inputs to 8 bits, and which step an input takes may hang on the last bit of a float:
    in some of so many layers it does."""
    sizes = {**SIZES, "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 1536}
    config = LlamaConfig(**{**sizes, "num_hidden_layers": 80})
    model = model_of(config, dtype)
    quantise(model, "int8", Path())
    assert use_native_modules(model)[1] == 80
