"""A GGUF file becomes a model directory that the engine serves and the router can tokenise with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.core.config import KEPT_BLOCKS_FILE
from services.core.errors import ConfigError, UnsupportedModel
from services.engine.config import EngineConfig, EngineInfo
from services.engine.cpu import quantisation
from services.engine.loading import load
from services.engine.model import kept_blocks
from services.engine.model.gguf_conversion import convert_gguf
from services.engine.native.bindings import kernels
from tests.support.engine_driver import drive
from tests.support.equality import GreedyReference
from tests.support.models import EOS_TOKEN_ID, VOCAB_SIZE, tiny_model

TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
END_OF_TURN = 5


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns the weight with the order of rotary dimensions that GGUF files have."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    directory: Path, path: Path, kinds: Mapping[str, GGMLQuantizationType] | None = None, without: str | None = None
) -> None:
    """Writes the model as GGUF. `kinds` are, by the end of a weight's name, the types that it is quantised to; others
    have 32 bits. The weight `without` is left out."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCAB_SIZE)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types([3 if token_id < 3 else 1 for token_id in range(VOCAB_SIZE)])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_eot_token_id(END_OF_TURN)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        if name == without:
            continue
        if "q_proj" in name:
            weight = interleaved(weight, config.num_attention_heads)
        elif "k_proj" in name:
            weight = interleaved(weight, config.num_key_value_heads)
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        kind = next((kind for end, kind in (kinds or {}).items() if name.endswith(end)), None)
        data = weight if kind is None else quants.quantize(weight, kind)
        writer.add_tensor(TENSORS[name] if name in TENSORS else f"blk.{layer}.{TENSORS[rest]}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    """Transformers would put random numbers in its place, other ones each time."""
    original = tiny_model("llama", tmp_path)
    write_gguf(original, tmp_path / "tiny.gguf", without="model.layers.1.mlp.down_proj.weight")
    with pytest.raises(UnsupportedModel, match=r"lacks 1 of the model's weights, such as model\.layers\.1\.mlp\.down"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_converted_model_is_complete_and_right(tmp_path: Path) -> None:
    # Values of bfloat16, so that nothing is lost on the way.
    original = tiny_model("llama", tmp_path, dtype=torch.bfloat16, head_dim=16)
    write_gguf(original, tmp_path / "tiny.gguf")
    converted = tmp_path / "cache" / "converted"
    convert_gguf(tmp_path / "tiny.gguf", converted)
    assert [path.name for path in converted.parent.iterdir()] == ["converted"]
    before = AutoModelForCausalLM.from_pretrained(original).state_dict()
    after = AutoModelForCausalLM.from_pretrained(converted).state_dict()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, msg=name)
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == [2, END_OF_TURN]
    assert "quantization_config" not in json.loads((converted / "config.json").read_text())
    assert json.loads((converted / "tokenizer_config.json").read_text())["chat_template"]
    theirs, ours = AutoTokenizer.from_pretrained(original), AutoTokenizer.from_pretrained(converted)
    for text in ("The baton is passed.", "<|im_start|>user\nhé<|im_end|>"):
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text).input_ids) == text
    # Digits stand alone, so that the spaces before them stay together.
    assert len(ours("a   12").input_ids) == len(ours("a   ").input_ids) + 2
    reference = GreedyReference(converted)
    with drive(converted) as driver:
        assert driver.engine.info.eos_token_ids == (2, END_OF_TURN)
        (found,) = driver.generate([[5, 6, 7]], 8)
    reference.check([5, 6, 7], found)
    convert_gguf(tmp_path / "nothing.gguf", converted)  # it is there already


def test_a_converted_copy_pairs_with_its_original_where_nothing_was_lost(tmp_path: Path) -> None:
    """The values count, and not the file they came from: GGUF files of fewer bits have other values."""

    def computes(directory: Path) -> tuple[str, str]:
        loaded = load(EngineConfig(str(directory), "m", dtype="float32", num_blocks=8))
        loaded.cache.close()
        return loaded.info.weights_digest, loaded.info.config_digest

    original = tiny_model("llama", tmp_path, dtype=torch.bfloat16, head_dim=16)
    generation = json.loads((original / "generation_config.json").read_text())
    write_gguf(original, tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "converted")
    weights, config = computes(original)
    assert computes(tmp_path / "converted")[0] == weights
    assert computes(tmp_path / "converted")[1] != config, "the file ends a sequence at one more id"
    generation["eos_token_id"] = [EOS_TOKEN_ID, END_OF_TURN]
    (original / "generation_config.json").write_text(json.dumps(generation))
    assert computes(tmp_path / "converted") == computes(original)


def test_a_broken_file_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(UnsupportedModel, match=r"broken\.gguf is damaged or incomplete"):
        convert_gguf(tmp_path / "broken.gguf", tmp_path / "cache" / "broken")
    assert not (tmp_path / "cache").exists()


KINDS = {
    "embed_tokens.weight": GGMLQuantizationType.Q8_0,
    "lm_head.weight": GGMLQuantizationType.Q8_0,
    "q_proj.weight": GGMLQuantizationType.Q4_0,
    "k_proj.weight": GGMLQuantizationType.Q4_1,
    "v_proj.weight": GGMLQuantizationType.Q5_0,
    "o_proj.weight": GGMLQuantizationType.Q5_1,
    "gate_proj.weight": GGMLQuantizationType.Q4_0,
    "up_proj.weight": GGMLQuantizationType.Q4_0,
}
"""Of the down projection nothing: it stays as it is."""


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model converted from a file with quantised weights, which are kept."""
    folder = tmp_path_factory.mktemp("quantised")
    original = tiny_model("llama", folder, head_dim=16)
    write_gguf(original, folder / "tiny.gguf", KINDS)
    convert_gguf(folder / "tiny.gguf", folder / "converted")
    return folder / "converted"


def test_quantised_weights_are_kept_bit_for_bit(quantised: Path) -> None:
    weights = AutoModelForCausalLM.from_pretrained(quantised).state_dict()
    found = {name: (kind, grouped.dequantised()) for name, kind, grouped in kept_blocks.read(quantised)}
    assert len(found) == 3 * 6 + 1
    for name, (kind, weight) in found.items():
        assert KINDS[f"{name.rpartition('.')[2]}.weight"].name == kind
        assert torch.equal(weight.bfloat16(), weights[f"{name}.weight"]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_is_served_as_it_is_or_dequantised(quantised: Path, dtype: str) -> None:
    if kernels() is None:
        pytest.skip("the kernels were not built here")

    def info(quantization: str) -> EngineInfo:
        loaded = load(EngineConfig(str(quantised), "m", dtype=dtype, quantization=quantization, num_blocks=8))
        loaded.cache.close()
        return loaded.info

    kept, plain, rounded = info("gguf"), info("none"), info("int8")
    assert kept.numerics == f"GGUF Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 weights, {dtype} activations rounded to 8 bits"
    assert plain.numerics == f"{dtype} weights, {dtype} activations"
    assert len({each.weights_digest for each in (kept, plain, rounded)}) == 3
    assert len({each.config_digest for each in (kept, plain, rounded)}) == 1
    (quantised / KEPT_BLOCKS_FILE).rename(quantised / "hidden")
    try:
        with pytest.raises(ConfigError, match="has no weights of a GGUF file; give none, int8 or int4"):
            info("gguf")
    finally:
        (quantised / "hidden").rename(quantised / KEPT_BLOCKS_FILE)


def test_without_kernels_they_are_served_too(
    quantised: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quantisation, "kernels", lambda: None)
    loaded = load(EngineConfig(str(quantised), "m", quantization="gguf", num_blocks=8))
    loaded.cache.close()
    assert loaded.info.numerics.startswith("GGUF Q4_0")
    assert "gguf is slower than none" in caplog.text


def test_blocks_of_another_file_are_refused(quantised: Path, tmp_path: Path) -> None:
    if kernels() is None:
        pytest.skip("the kernels were not built here")
    other = tiny_model("llama", tmp_path, dtype=torch.bfloat16, head_dim=16, seed=1)
    (other / KEPT_BLOCKS_FILE).write_bytes((quantised / KEPT_BLOCKS_FILE).read_bytes())
    with pytest.raises(UnsupportedModel, match=r"is not of these weights .* --quantization none"):
        load(EngineConfig(str(other), "m", quantization="gguf", num_blocks=8))
    load(EngineConfig(str(other), "m", num_blocks=8)).cache.close()
