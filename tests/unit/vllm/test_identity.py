"""Tests what tells a worker with vLLM from others: every difference by which KV or tokens would differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import UnsupportedModel
from services.engine.config import EngineConfig, EngineInfo
from services.vllm.identity import eos_token_ids, identity_of, weights_digest
from services.vllm.slot_memory import SlotMemory

FACTS: dict[str, Any] = {
    "version": "0.32.0",
    "dtype": "float32",
    "max_model_len": 512,
    "vocab_size": 300,
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim": 4,
    "block_size": 16,
    "sharding": [1, 1],
    "quantization": "none",
    "config": [{}, "auto"],
}
BLOCK_BYTES = 16 * 2 * 2 * 2 * 4 * 4
"""Tokens, layers, keys and values, heads, elements, and their bytes."""
CACHE = {"form": "2 x [2, 16, 8] torch.float32", "backend": "CPU_ATTN on x86 amx"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "transformers_version": "5.20"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 1024)
    return tmp_path


def info(folder: Path, *, cache: dict[str, str] | None = None, num_ranks: int = 1, **facts: Any) -> EngineInfo:
    config = EngineConfig(model_path=str(folder), model_id="tiny")
    memory = SlotMemory(8, BLOCK_BYTES)
    caches = {rank: {**CACHE, **(cache or {})} for rank in range(num_ranks)}
    try:
        return identity_of(config, {**FACTS, **facts}, caches, memory)
    finally:
        memory.close()


def test_the_same_is_the_same(folder: Path) -> None:
    first, second = info(folder), info(folder)
    assert first == second
    assert first.engine == "vllm"
    assert first.max_model_len == 8 * 16, "no more fits the pool"


DIFFERENCES: dict[str, dict[str, Any]] = {
    "version": {"version": "0.32.1"},
    "sharding": {"sharding": [2, 1]},
    "stages": {"sharding": [1, 2]},
    "quantisation": {"quantization": "awq"},
    "overrides": {"config": [{"rope_theta": 5000}, "auto"]},
    "weights at random": {"config": [{}, "dummy"]},
    "form": {"cache": {"form": "2 x [16, 2, 8] torch.float32"}},
    "backend": {"cache": {"backend": "CPU_ATTN on x86 vec"}},
    "ranks": {"num_ranks": 2},
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_workers_that_cannot_exchange_kv_differ(folder: Path, what: str) -> None:
    assert info(folder, **DIFFERENCES[what]).config_digest != info(folder).config_digest


def _flip(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


WEIGHTS: dict[str, Callable[[Path], object]] = {
    "a byte": _flip,
    "a longer file": lambda folder: (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1025),
    "another file": lambda folder: (folder / "more.safetensors").write_bytes(b"x"),
    "another name": lambda folder: (folder / "model.safetensors").rename(folder / "weights.safetensors"),
    "none": lambda folder: (folder / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("what", WEIGHTS)
def test_other_weights_differ(folder: Path, what: str) -> None:
    before = weights_digest(folder)
    WEIGHTS[what](folder)
    assert weights_digest(folder) != before
    assert len(before) == 32


@pytest.mark.parametrize(
    "facts", [{"num_kv_heads": 1}, {"head_dim": 576}, {"num_layers": 3}, {"dtype": "bfloat16"}, {"block_size": 32}]
)
def test_blocks_that_are_not_keys_and_values_of_each_token_are_refused(folder: Path, facts: dict[str, Any]) -> None:
    """A model with latent attention has such, and one whose heads are on several ranks."""
    with pytest.raises(UnsupportedModel, match=f"{BLOCK_BYTES} bytes for .* Baton hands over no other kind"):
        info(folder, **facts)


@pytest.mark.parametrize(
    ("generation", "config", "found"),
    [({"eos_token_id": [3, 2]}, {"eos_token_id": 1}, (3, 2)), ({}, {"eos_token_id": 1}, (1,)), (None, {}, ())],
)
def test_which_tokens_end_the_output(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], found: tuple[int, ...]
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert eos_token_ids(tmp_path) == found
