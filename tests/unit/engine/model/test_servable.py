"""Models that cannot be served are refused at load, with the reason."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.core.errors import ConfigError, UnsupportedModel
from services.engine.attention import paged
from services.engine.config import EngineConfig
from services.engine.loading import load
from services.engine.model import servable, verification, weights
from services.engine.model.kv_cache import KVShape
from services.engine.model.paged_model import PagedModel, register_attention
from tests.support.models import SLIDING_WINDOW, tiny_model

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def build(model_type: str, **fields: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **{**SMALL, **fields})
    return AutoModelForCausalLM.from_config(config, attn_implementation=register_attention()).eval()


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        act()
    return str(caught.value)


def test_the_configuration_says_it() -> None:
    def reason(model_type: str, **fields: Any) -> str:
        return refusal(lambda: servable.check_config(AutoConfig.for_model(model_type, **fields)))

    assert "encoder-decoder" in reason("t5")
    assert "linear_attention" in reason("qwen3_next")
    assert "shares keys and values" in reason("gemma3n_text")
    assert "later tokens" in reason("gemma3_text", use_bidirectional_attention=True)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "dynamic" in reason("llama", rope_parameters=dynamic)


def test_the_run_says_it() -> None:
    assert "s_aux" in refusal(lambda: servable.examine(build("gpt_oss", num_local_experts=2)))
    assert "0 of 2 layers" in refusal(lambda: servable.examine(_deaf(build("llama"))))
    assert "attention interface" in refusal(lambda: servable.examine(_unsupporting(build("llama"))))
    mixed = build("llama")
    mixed.model.layers[1].self_attn.v_proj = nn.Linear(32, 32)
    assert "different heads" in refusal(lambda: servable.examine(mixed))
    assert "different heads" in refusal(lambda: servable.examine(_deepseek()))


def _deepseek() -> PreTrainedModel:
    dimensions = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 8}
    return build("deepseek_v3", q_lora_rank=8, kv_lora_rank=8, n_routed_experts=8, **dimensions)


def _deaf(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("eager")
    return model


def _unsupporting(model: PreTrainedModel) -> PreTrainedModel:
    model._supports_attention_backend = False
    return model


def test_the_numbers_say_it(tmp_path: Path) -> None:
    module = weights.load_model(tiny_model("gemma3", tmp_path), "float32", CPU, register_attention())
    shape = servable.examine(module)

    def without_window(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: paged.StepLayout, scoring: paged.Scoring
    ) -> torch.Tensor:
        return paged.reference(query, keys, values, layout, dataclasses.replace(scoring, sliding_window=None))

    plain = verification.plain_logits(module, shape.vocab_size)
    kv_shape = KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, 16, shape.dtype)
    assert verification.verify(PagedModel(module, shape, paged.reference), kv_shape, plain) < 1e-4
    reason = refusal(lambda: verification.verify(PagedModel(module, shape, without_window), kv_shape, plain))
    assert "differ" in reason
    assert module.config.sliding_window == SLIDING_WINDOW
    assert module.config._attn_implementation == register_attention()


def test_longrope_stays_where_its_factors_do_not_change() -> None:
    factors = [1.0] * 8
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    model = build("phi3", rope_parameters=rope, original_max_position_embeddings=64, pad_token_id=0, eos_token_id=1)
    assert servable.examine(model).max_model_len == 64


def test_flags_are_named(tmp_path: Path) -> None:
    directory = str(tiny_model("llama", tmp_path))
    with pytest.raises(ConfigError, match="--max-model-len: 5000"):
        load(EngineConfig(directory, "m", max_model_len=5000))
    with pytest.raises(ConfigError, match="--memory-utilization: 0%"):
        load(EngineConfig(directory, "m", memory_utilization=1e-6))


def test_directories_without_a_model(tmp_path: Path) -> None:
    assert "cannot be loaded" in refusal(lambda: weights.load_model(tmp_path, "auto", CPU, register_attention()))
    build("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "cannot be loaded" in refusal(lambda: weights.load_model(tmp_path, "auto", CPU, register_attention()))
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gptj", n_embd=32, n_layer=1, n_head=2, rotary_dim=8)
    ).save_pretrained(tmp_path)
    assert "attention interface" in refusal(lambda: weights.load_model(tmp_path, "auto", CPU, register_attention()))


def test_weights_that_could_run_code_are_not_read(tmp_path: Path) -> None:
    """A directory that has only a pickle is refused by the file's name; beside safetensors nobody looks at it."""
    directory = tiny_model("llama", tmp_path)
    ran = tmp_path / "ran"
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(_Runs(ran)))
    assert weights.load_model(directory, "auto", CPU, register_attention()) is not None
    for file in directory.glob("*.safetensors"):
        file.unlink()
    assert "pytorch_model.bin" in refusal(lambda: weights.load_model(directory, "auto", CPU, register_attention()))
    (directory / "pytorch_model.bin").rename(directory / "pytorch_model.bin.index.json")
    assert "cannot be loaded" in refusal(lambda: weights.load_model(directory, "auto", CPU, register_attention()))
    assert not ran.exists()


class _Runs:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._path,)
