"""A GGUF file becomes a model directory that the engine serves and the router can tokenise with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.core.errors import UnsupportedModel
from services.engine.config import EngineConfig
from services.engine.loading import load
from services.engine.model.gguf_conversion import convert_gguf
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
    """The order of rotary dimensions in GGUF files."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(directory: Path, path: Path) -> None:
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
        if "q_proj" in name:
            weight = interleaved(weight, config.num_attention_heads)
        elif "k_proj" in name:
            weight = interleaved(weight, config.num_key_value_heads)
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        writer.add_tensor(TENSORS[name] if name in TENSORS else f"blk.{layer}.{TENSORS[rest]}", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    """Where it came from does not count, what is computed does: GGUF files of fewer bits have other values."""

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
    with pytest.raises(UnsupportedModel, match=r"broken\.gguf cannot be converted"):
        convert_gguf(tmp_path / "broken.gguf", tmp_path / "cache" / "broken")
    assert list((tmp_path / "cache").iterdir()) == []
