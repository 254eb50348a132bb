"""Checkpoints that are incomplete, contradict themselves or are of another kind are refused in one clear line.

Nothing of them is ever replaced by random weights.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.core.errors import UnsupportedModel
from services.engine.model.weights import load_model
from tests.support.checkpoints import Form, write_checkpoint
from tests.support.models import tiny_model

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1.mlp.up_proj"


def refused(model: Path) -> str:
    """Returns the line with which the model is refused."""
    with pytest.raises(UnsupportedModel) as raised:
        load_model(model, "auto", torch.device("cpu"), "eager")
    line = str(raised.value)
    assert "\n" not in line
    assert str(model) in line
    return line


def change_tensors(model: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def change_config(model: Path, **fields: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return write_checkpoint(tiny_model("llama", tmp_path), Form(desc_act=True))[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop(f"{LAYER}.qzeros"), rf"{LAYER}.qzeros is missing: .* fetch them again"),
        (lambda tensors: tensors.pop(f"{LAYER}.scales"), f"{LAYER}.scales is missing"),
        (lambda tensors: tensors.pop(f"{LAYER}.g_idx"), f"{LAYER}.g_idx is missing"),
        (lambda tensors: tensors.pop(f"{LAYER}.qweight"), f"lacks 1 of the model's weights, such as {LAYER}.weight"),
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks 1 of the model's weights, such as model.norm.weight"),
        (
            lambda tensors: tensors.update({f"{LAYER}.qweight": tensors[f"{LAYER}.qweight"][:4].clone()}),
            rf"{LAYER}.qweight is I32 \[4, 96\], and for GPTQ 4-bit \(groups of 32\) and a layer of 64 to 96 it has to "
            r"be I32 \[8, 96\]",
        ),
        (
            lambda tensors: tensors.update({f"{LAYER}.qzeros": tensors[f"{LAYER}.qzeros"].float()}),
            rf"{LAYER}.qzeros is F32 .* has to be I32 \[2, 12\]",
        ),
        (
            lambda tensors: tensors.update({f"{LAYER}.scales": tensors[f"{LAYER}.scales"].int()}),
            rf"{LAYER}.scales is I32 .* has to be F16 or BF16 or F32 \[2, 96\]",
        ),
        (lambda tensors: tensors[f"{LAYER}.g_idx"].fill_(2), f"{LAYER}: g_idx has groups beyond the last"),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.experts.0.qweight": torch.zeros(1, dtype=torch.int32)}),
            "model.layers.1.mlp.experts.0 is quantised in the files, and the model has no linear layer of that name",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}),
            r"has model.norm.weight of shape \[63\], and by its config.json it has to be \[64\]",
        ),
    ],
)
def test_tensors(change: Callable[[Tensors], Any], reason: str, saved: Path) -> None:
    change_tensors(saved, change)
    line = refused(saved)
    assert re.search(reason, line), line


def test_a_plain_model_that_lacks_a_weight_is_refused_too(tmp_path: Path) -> None:
    """The transformers library would fill in random ones."""
    model = tiny_model("llama", tmp_path)
    change_tensors(model, lambda tensors: tensors.pop(f"{LAYER}.weight"))
    assert f"lacks 1 of the model's weights, such as {LAYER}.weight: fetch it again" in refused(model)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "GPTQ weights of 3 bits are not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ weights in the layout 'gemv' are not supported"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "qweight is I32 .* for AWQ 4-bit"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, "qzeros is I32 .* for GPTQ 4-bit .groups of 64"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, "qweight is I32 .* for GPTQ 8-bit"),
        ({"quant_method": "no-such"}, "quantised by 'no-such', which nothing here can read; take it in 16 bits"),
        ({"bits": 4}, "quantised by None, which nothing here can read"),
        ({"load_in_4bit": True}, "quantised by bitsandbytes, which cannot be loaded here; take it in 16 bits"),
        ({"quant_method": "compressed-tensors"}, "by compressed-tensors, which cannot be loaded here; take it in"),
    ],
)
def test_methods(fields: dict[str, Any], reason: str, saved: Path) -> None:
    change_config(saved, quantization_config=fields)
    line = refused(saved)
    assert re.search(reason, line), line


def test_a_plain_model_that_is_called_quantised(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path)
    change_config(model, quantization_config=Form().fields())
    assert "GPTQ is named by config.json, but no layer is quantised" in refused(model)


def test_a_header_that_lies(saved: Path) -> None:
    """The header is compared with the size of the file."""
    path = saved / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header[f"{LAYER}.qweight"].update(shape=[2**20, 2**20], data_offsets=[0, 2**42])
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    assert "has damaged weights, fetch them again" in refused(saved)


@pytest.mark.parametrize(
    "text", ['{"weight_map": {}}', "{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": "../../elsewhere"}}']
)
def test_an_index_that_makes_no_sense(text: str, saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "model-00001-of-00001.safetensors")
    (saved / "model.safetensors.index.json").write_text(text)
    refused(saved)
