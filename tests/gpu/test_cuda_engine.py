"""Tests the engine on a GPU: attention, the pool, and greedy output against transformers' own on the CPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from services.cli import machine
from services.cli.plan import spread_devices
from services.engine.attention import choice, paged
from services.engine.attention.varlen import VarlenAttention
from services.engine.model.kv_cache import KVCache, KVShape
from tests.support.engine_driver import drive
from tests.support.equality import GreedyReference
from tests.support.models import FAMILIES, SLIDING_WINDOW, VOCAB_SIZE, tiny_model

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
    paged.verify(backend, torch.device(CUDA), torch.bfloat16, heads, kv_heads, head_dim, 16)


@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_varlen_attention_over_block_tables_is_exact_or_refuses(block_size: int) -> None:
    """The flash attention that is installed decides which block sizes are taken."""
    try:
        paged.verify(VarlenAttention(True), torch.device(CUDA), torch.bfloat16, 9, 3, 64, block_size)
    except RuntimeError as error:
        pytest.skip(f"no block tables of {block_size} here: {error}")


def test_bfloat16_attends_by_flash_attention() -> None:
    _, backend = choice.select(torch.device(CUDA), torch.bfloat16, 9, 3, 64, 16)
    assert isinstance(backend, VarlenAttention)


def test_bfloat16_generates(tmp_path: Path) -> None:
    """Loading has compared its logits with transformers' own."""
    prompts = [prompt_of(length) for length in LENGTHS]
    with drive(tiny_model("llama", tmp_path), device=CUDA, dtype="bfloat16") as driver:
        together = driver.generate(prompts, 16)
    assert [len(output) for output in together] == [16] * len(prompts)


def test_blocks_are_read_beside_a_step_that_runs() -> None:
    """The read does not wait for the step: the step's stream is kept busy until the block has been read."""
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.bfloat16)
    cache = KVCache(shape, 5, torch.device(CUDA))
    data = random.Random(1).randbytes(cache.block_bytes)
    cache.write_blocks([1], [data])
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # cycles of the device: about a second
    done.record()
    assert bytes(cache.read_blocks([1])[0]) == data
    assert not done.query()
    torch.cuda.synchronize()
    cache.close()


def test_a_failed_step_is_over_before_it_is_reclaimed(tmp_path: Path) -> None:
    with drive(tiny_model("llama", tmp_path), device=CUDA) as driver:
        done = torch.cuda.Event()
        torch.cuda._sleep(1_000_000_000)
        done.record()
        driver.engine._runner.reclaim()
        assert done.query()


def test_blocks_come_and_go() -> None:
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.bfloat16)
    cache = KVCache(shape, 5, torch.device(CUDA))
    data = random.Random(0).randbytes(cache.block_bytes)
    cache.write_blocks([3], [data])
    assert bytes(cache.read_blocks([3])[0]) == data
    target = bytearray(cache.block_bytes)
    cache.copy_blocks([3], [memoryview(target)])
    assert target == data
    assert not any(cache.read_blocks([2])[0])
    cache.clear([3])
    assert not any(cache.read_blocks([3])[0])
    cache.close()


def test_baton_up_finds_and_divides_the_gpus_that_are_there() -> None:
    assert machine.num_gpus() == torch.cuda.device_count() > 0
    placed = spread_devices("cuda", 2, machine.num_gpus())
    assert {torch.device(device).index for device, _ in placed} <= set(range(torch.cuda.device_count()))
