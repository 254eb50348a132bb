"""Tests a model's digests: what changes what is computed changes them, and nothing else does."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from services.engine import loading
from services.engine.config import EngineConfig, EngineInfo
from services.engine.model import fingerprint, weights
from services.engine.model.paged_model import register_attention
from services.kv.layout import Layout
from services.kvtransfer.wire import layout_from_proto, layout_to_proto
from tests.support.models import EOS_TOKEN_ID, FAMILIES, tiny_model

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
LAYOUT = Layout("m", "weights", "config", "float32", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: tiny_model(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def with_config(directory: Path, parent: Path, **fields: Any) -> Path:
    """Returns a model of the same weights under another config.json. A field of None is removed."""
    other = parent / directory.name
    other.mkdir(parents=True)
    for file in directory.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = {**json.loads((directory / "config.json").read_text()), **fields}
    config = {name: value for name, value in config.items() if value is not None}
    (other / "config.json").write_text(json.dumps(config))
    return other


def info_of(directory: Path, dtype: str = "float32") -> EngineInfo:
    config = EngineConfig(str(directory), "m", dtype=dtype, num_blocks=8)
    loaded = loading.load(config)
    loaded.cache.close()
    return loaded.info


def digests(info: EngineInfo) -> tuple[str, str]:
    return info.weights_digest, info.config_digest


def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.arange(3, 43)[None]
    with torch.inference_mode():
        # Positions are given, as the engine gives them.
        found: torch.Tensor = model(tokens, position_ids=torch.arange(40)[None], use_cache=False).logits
    return found


def changed(value: Any) -> Any:
    """Returns another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}-other"
        case list():
            return [*value, "another"]
        case dict():
            return {**value, "another": 1}
        case _:
            return 1


class Bent(PreTrainedConfig):
    """Is a configuration of which one field shows another value."""

    model_type = "bent"

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        self.fields = fields

    def to_dict(self) -> dict[str, Any]:
        return self.fields


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_counts_but_those_known_to_change_nothing(family: str, directories: dict[str, Path]) -> None:
    fields = AutoConfig.from_pretrained(directories[family]).to_dict()
    before = fingerprint.config_digest(Bent(fields), [EOS_TOKEN_ID])
    for name, value in fields.items():
        other = copy.deepcopy(fields)
        other[name] = changed(value)
        after = fingerprint.config_digest(Bent(other), [EOS_TOKEN_ID])
        assert (after == before) == (name in fingerprint.IRRELEVANT), f"{family}: {name}"
    assert fingerprint.config_digest(Bent({**fields, "unheard_of": 0}), [EOS_TOKEN_ID]) != before
    assert fingerprint.config_digest(Bent(fields), [EOS_TOKEN_ID, 7]) != before


def test_fields_within_fields_count() -> None:
    rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    other = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 2e4}}
    one = fingerprint.config_digest(Bent({"rope_parameters": rope}), [])
    assert one != fingerprint.config_digest(Bent({"rope_parameters": other}), [])
    whole = {"full_attention": {"rope_theta": 1000000}, "sliding_attention": {"rope_theta": 10000}}
    assert one == fingerprint.config_digest(Bent({"rope_parameters": whole}), []), "equal numbers, written otherwise"


def test_sub_configurations_count() -> None:
    def of(**text: Any) -> str:
        config = AutoConfig.for_model("gemma3", text_config={"model_type": "gemma3_text", **text})
        return fingerprint.config_digest(config, [])

    assert of(rms_norm_eps=1e-5) != of(rms_norm_eps=1e-6)
    assert of(initializer_range=0.1) == of(initializer_range=0.2)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_does_not_count_changes_no_logit(family: str, directories: dict[str, Path], tmp_path: Path) -> None:
    """The list of exceptions is put to the test: all of them bent at once."""
    directory = directories[family]
    fields = json.loads((directory / "config.json").read_text())
    bent: dict[str, Any] = {
        name: value / 2 if isinstance(value, float) else 7
        for name, value in fields.items()
        if name in fingerprint.IRRELEVANT and isinstance(value, int | float) and not isinstance(value, bool)
    }
    other = with_config(directory, tmp_path, **bent, use_cache=False, architectures=["Another"], num_labels=3)
    assert len(bent) >= 4, "initializer_range, and the ids of three tokens"
    assert torch.equal(logits(directory), logits(other))
    assert digests(info_of(directory)) == digests(info_of(other))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"rope_parameters": YARN}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("llama", {"rms_norm_eps": 1e-2}),
        ("llama", {"hidden_act": "gelu"}),
        ("gemma2", {"attn_logit_softcapping": 1.0}),
        ("gemma2", {"query_pre_attn_scalar": 64}),
        ("gemma3", {"sliding_window": 4}),
        ("gpt2", {"layer_norm_epsilon": 1e-1}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ],
    ids=str,
)
def test_equal_weights_that_compute_otherwise_differ(
    family: str, fields: dict[str, Any], directories: dict[str, Path], tmp_path: Path
) -> None:
    one, other = directories[family], with_config(directories[family], tmp_path, **fields)
    assert not torch.equal(logits(one), logits(other)), "the case must be one"
    assert info_of(one).config_digest != info_of(other).config_digest


def test_end_of_sequence_ids_count_from_whichever_file_they_are(directories: dict[str, Path], tmp_path: Path) -> None:
    other = with_config(directories["llama"], tmp_path)
    generation = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [EOS_TOKEN_ID, 9]}))
    assert info_of(directories["llama"]).config_digest != info_of(other).config_digest


def test_defaults_written_out_or_left_out_are_the_same(directories: dict[str, Path], tmp_path: Path) -> None:
    other = with_config(directories["llama"], tmp_path, mlp_bias=None, hidden_act=None, attention_bias=None)
    assert digests(info_of(directories["llama"])) == digests(info_of(other))


def test_weights_count(directories: dict[str, Path], tmp_path: Path) -> None:
    other = tiny_model("llama", tmp_path, seed=1)
    kinds = {info_of(directories["llama"]).weights_digest, info_of(other).weights_digest}
    assert len({*kinds, info_of(directories["llama"], "bfloat16").weights_digest}) == 3
    assert info_of(directories["llama"]).config_digest == info_of(other).config_digest


def test_every_buffer_counts_persistent_or_not(directories: dict[str, Path]) -> None:
    model = weights.load_model(directories["llama"], "float32", CPU, register_attention())
    before = fingerprint.weights_digest(model)
    saved = model.state_dict()
    names = [name for name, _ in model.named_buffers()]
    assert any(name not in saved for name in names), "some are not persistent"
    for name in names:
        buffer = model.get_buffer(name)
        was = buffer[-1].item()
        buffer[-1] *= 1.5
        assert fingerprint.weights_digest(model) != before, name
        buffer[-1] = was
    assert fingerprint.weights_digest(model) == before


def test_small_tensors_are_read_whole_and_large_ones_in_many_places(directories: dict[str, Path]) -> None:
    model = weights.load_model(directories["llama"], "float32", CPU, register_attention())
    before = fingerprint.weights_digest(model)
    weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    weight.data[17, 31] += 1.0
    assert fingerprint.weights_digest(model) != before
    large = torch.nn.Module()
    large.register_parameter("weight", torch.nn.Parameter(torch.zeros(1 << 20), requires_grad=False))
    empty = fingerprint.weights_digest(large)
    large.weight.data[1 << 19 : (1 << 19) + 300] = 1.0  # type: ignore[index]
    assert fingerprint.weights_digest(large) != empty


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replaced_modules_do_not_show(
    directories: dict[str, Path], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels, and what stands in for a model's own parts, are how something is computed, not what."""
    native = info_of(directories["llama"], dtype)
    monkeypatch.setattr(loading, "use_fast_paths", lambda module, kv_dtype: "")
    assert info_of(directories["llama"], dtype) == native
    assert native.numerics == f"{dtype} weights, {dtype} activations"


def test_each_scheme_of_quantisation_computes_something_else(directories: dict[str, Path]) -> None:
    def of(scheme: str) -> EngineInfo:
        loaded = loading.load(
            EngineConfig(str(directories["llama"]), "m", dtype="float32", quantization=scheme, num_blocks=8)
        )
        loaded.cache.close()
        return loaded.info

    found = {scheme: of(scheme) for scheme in ("none", "int8", "int4")}
    assert found["none"] == info_of(directories["llama"]), "auto, without a file's own blocks"
    module = weights.load_model(directories["llama"], "float32", CPU, register_attention())
    assert found["none"].weights_digest == fingerprint.weights_digest(module)
    assert len({info.weights_digest for info in found.values()}) == 3
    assert found["int4"].numerics == "int4 (groups of 32) weights, float32 activations rounded to 8 bits"
    assert of("int4") == found["int4"]


def test_names_paths_and_threads_do_not_show(directories: dict[str, Path], tmp_path: Path) -> None:
    elsewhere = with_config(directories["llama"], tmp_path / "elsewhere", transformers_version="4.0", dtype="bfloat16")
    assert info_of(directories["llama"]) == info_of(elsewhere)


def test_a_layout_s_fingerprint_is_all_of_it() -> None:
    for field in dataclasses.fields(Layout):
        other = dataclasses.replace(LAYOUT, **{field.name: changed(getattr(LAYOUT, field.name))})
        assert other.fingerprint != LAYOUT.fingerprint, field.name
        assert field.name in (LAYOUT.mismatch(other) or "")
    assert dataclasses.replace(LAYOUT).fingerprint == LAYOUT.fingerprint


def test_blocks_that_torch_has_written_keep_their_label() -> None:
    """Disks and backends have blocks of the time when there was no other engine."""
    assert LAYOUT.engine == "torch"
    assert LAYOUT.fingerprint == "688faf3b5f0cae3dd0e2018d580448f0"
    unnamed = layout_to_proto(LAYOUT)
    unnamed.ClearField("engine")
    assert layout_from_proto(unnamed) == LAYOUT
    vllm = dataclasses.replace(LAYOUT, engine="vllm")
    assert layout_from_proto(layout_to_proto(vllm)) == vllm
