"""The headers that are checked are those of the files that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.core.errors import UnsupportedModel
from services.engine.model.weights import load_model
from tests.support.models import tiny_model


def doubled(model: Path, folder: Path) -> Path:
    """Puts the model's weights into two files of `folder`, which both have model.norm.weight; returns the index."""
    folder.mkdir(exist_ok=True)
    tensors = load_file(model / "model.safetensors")
    name = "model.norm.weight"
    save_file(tensors, folder / "a.safetensors", metadata={"format": "pt"})
    save_file({name: tensors[name] * 100}, folder / "b.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "a.safetensors") | {"another": "b.safetensors"}}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    return path


def test_a_file_that_config_json_names(tmp_path: Path) -> None:
    """Transformers takes it, and leaves model.safetensors alone."""
    model = tiny_model("llama", tmp_path)
    doubled(model, model).rename(model / "other.safetensors.index.json")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors.index.json"}))
    with pytest.raises(UnsupportedModel):
        load_model(model, "auto", torch.device("cpu"), "eager")
