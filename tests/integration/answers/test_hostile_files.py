"""What a stranger wrote into a model's directory is refused in words, before much is allocated for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.core.config import KEPT_BLOCKS_FILE
from services.core.errors import UnsupportedModel
from services.engine.cpu.quantisation import quantise
from services.engine.model.weights import load_model
from tests.support.models import tiny_model

LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("metadata", "shape"),
    [
        (None, (96, 36)),
        ({"kinds": "{"}, (96, 36)),
        ({"kinds": "[1]"}, (96, 36)),
        ({"kinds": "[" * 100_000}, (96, 36)),
        ({"kinds": json.dumps({LAYER: "Q9"})}, (96, 36)),
        ({"kinds": json.dumps({"absent": "Q4_0"})}, (96, 36)),
        ({"kinds": json.dumps({LAYER: "Q4_0"})}, (96, 35)),
        ({"kinds": json.dumps({LAYER: "Q4_0"})}, (36,)),
    ],
)
def test_kept_blocks_that_make_no_sense(
    metadata: dict[str, str] | None, shape: tuple[int, ...], tmp_path: Path
) -> None:
    directory = tiny_model("llama", tmp_path)
    save_file({LAYER: torch.zeros(shape, dtype=torch.uint8)}, directory / KEPT_BLOCKS_FILE, metadata=metadata)
    model = load_model(directory, "auto", torch.device("cpu"), "eager")
    with pytest.raises(UnsupportedModel):
        quantise(model, "gguf", directory)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_attention_heads": 0},
        {"num_hidden_layers": "x"},
        {"eos_token_id": "x"},
        {"dtype": ["bfloat16"]},
        {"quantization_config": "gptq"},
        {"layer_types": ["full_attention"] * 9},
    ],
)
def test_a_config_json_that_makes_no_sense(fields: dict[str, object], tmp_path: Path) -> None:
    directory = tiny_model("llama", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(UnsupportedModel) as raised:
        load_model(directory, "auto", torch.device("cpu"), "eager")
    assert "\n" not in str(raised.value)
