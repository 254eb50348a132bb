"""The engine on a GPU: attention, the pool, and greedy output against transformers' own on the CPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from services.engine import attention
from services.engine.attention_varlen import VarlenAttention
from services.engine.kv_cache import KVCache, KVShape
from tests.engine_driver import drive
from tests.equality import GreedyReference
from tests.models import FAMILIES, SLIDING_WINDOW, VOCAB_SIZE, tiny_model

CUDA = "cuda:0"
LENGTHS = (1, 15, 16, 17, SLIDING_WINDOW + 1, 90, 300)


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(3, VOCAB_SIZE), k=length)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_transformers_own(family: str, tmp_path: Path) -> None:
    directory = tiny_model(family, tmp_path)
    reference = GreedyReference(directory)
    prompts = [prompt_of(length) for length in LENGTHS]
    with drive(directory, device=CUDA, max_num_batched_tokens=40) as driver:
        for prompt in prompts[:3]:
            reference.check(prompt, *driver.generate([prompt], 24, cache_salt="alone"))
        for prompt, found in zip(prompts, driver.generate(prompts, 24), strict=True):
            reference.check(prompt, found)
    assert reference.num_near_ties <= 1


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (8, 8, 128)])
def test_varlen_attention_over_gathered_keys(heads: int, kv_heads: int, head_dim: int) -> None:
    backend = VarlenAttention(over_tables=False)
    attention.verify(backend, torch.device(CUDA), torch.bfloat16, heads, kv_heads, head_dim, 16)


@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_varlen_attention_over_block_tables_is_exact_or_refuses(block_size: int) -> None:
    """Which block sizes it takes depends on the flash attention that is installed."""
    try:
        attention.verify(VarlenAttention(True), torch.device(CUDA), torch.bfloat16, 9, 3, 64, block_size)
    except RuntimeError as error:
        pytest.skip(f"no block tables of {block_size} here: {error}")


def test_bfloat16_attends_by_flash_attention() -> None:
    backend = attention.select(torch.device(CUDA), torch.bfloat16, 9, 3, 64, 16)
    assert isinstance(backend, VarlenAttention)


def test_bfloat16_generates(tmp_path: Path) -> None:
    """Loading has compared its logits with transformers' own."""
    prompts = [prompt_of(length) for length in LENGTHS]
    with drive(tiny_model("llama", tmp_path), device=CUDA, dtype="bfloat16") as driver:
        together = driver.generate(prompts, 16)
    assert [len(output) for output in together] == [16] * len(prompts)


def test_blocks_come_and_go() -> None:
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.bfloat16)
    cache = KVCache(shape, 5, torch.device(CUDA))
    data = random.Random(0).randbytes(cache.block_bytes)
    cache.write_block(3, data)
    assert bytes(cache.read_block(3)) == data
    target = bytearray(cache.block_bytes)
    cache.copy_block(3, memoryview(target))
    assert target == data
    assert not any(cache.read_block(2))
    cache.clear([3])
    assert not any(cache.read_block(3))
    cache.close()
