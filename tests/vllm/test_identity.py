"""Tests that vLLM's fingerprint says what it computes with, wherever that was told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm_driver import config_of, load, tiny_for_vllm

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_for_vllm(tmp_path_factory.mktemp("models"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with another configuration of the model, and nothing else."""
    fields = json.loads((model / "config.json").read_text())
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    folder = tmp_path_factory.mktemp("other")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope="module")
def digest(model: Path) -> str:
    return digest_of(model)


def digest_of(model: Path, engine_args: dict[str, str] | None = None, **changes: Any) -> str:
    engine = load(config_of(model, **changes), **engine_args or {})
    try:
        return engine.info.config_digest
    finally:
        engine.stop()
        engine.close()


def test_limits_are_no_part_of_it(model: Path, digest: str) -> None:
    assert digest_of(model, num_blocks=48, max_model_len=512, max_num_seqs=3, max_num_batched_tokens=64) == digest


def test_overrides_and_another_ones_configuration_are(model: Path, other: Path, digest: str) -> None:
    found = {
        digest,
        digest_of(model, {"hf_config_path": str(other)}),
        digest_of(model, {"hf_overrides": json.dumps({"rms_norm_eps": 1e-3})}),
    }
    assert len(found) == 3
