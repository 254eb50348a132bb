"""Tests that greedy output equals transformers' `generate`: families, chunk sizes, batches, prefix hits, preemption,
handoff."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.engine.schedule.sequence import Mode
from services.kv.pool import Holder
from tests.support.blocks import set_aside
from tests.support.engine_driver import drive
from tests.support.equality import GreedyReference
from tests.support.models import FAMILIES, SLIDING_WINDOW, VOCAB_SIZE, tiny_model

EDGES = (1, 2, 15, 16, 17, 31, 33, 64, 100, 129, 250, 600)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}-{seed}").choices(range(3, VOCAB_SIZE), k=length)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(llama: Path) -> Iterator[GreedyReference]:
    reference = GreedyReference(llama)
    yield reference
    # Rounding may decide now and then, not as a rule.
    assert reference.num_near_ties * 200 <= reference.num_compared


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_prompt_lengths_alone_and_together(llama: Path, reference: GreedyReference, chunk: int) -> None:
    prompts = [prompt_of(length) for length in EDGES]
    expected = [reference.generate(prompt, 12) for prompt in prompts]
    with drive(llama, max_num_batched_tokens=chunk) as driver:
        for prompt, wanted in zip(prompts, expected, strict=True):
            (alone,) = driver.generate([prompt], 12, cache_salt="alone")
            reference.check(prompt, alone, wanted)
        together = driver.generate([*prompts, *prompts[:4]], 12, cache_salt="together")
    for prompt, found, wanted in zip([*prompts, *prompts[:4]], together, [*expected, *expected[:4]], strict=True):
        reference.check(prompt, found, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    directory = tiny_model(family, tmp_path)
    reference = GreedyReference(directory)
    prompts = [prompt_of(length) for length in (3, SLIDING_WINDOW + 1, 16, 90)]
    with drive(directory, max_num_batched_tokens=20) as driver:
        for prompt, found in zip(prompts, driver.generate(prompts, 24), strict=True):
            reference.check(prompt, found)
    assert reference.num_near_ties <= 1


def test_prefix_cache_hits(llama: Path, reference: GreedyReference) -> None:
    prompt = prompt_of(70)
    with drive(llama) as driver:
        (first,) = driver.generate([prompt], 20)
        again, longer = driver.generate([prompt, [*prompt, *first[:10]]], 10)
        hit = driver.engine.stats().prefix_tokens_hit
        (other_salt,) = driver.generate([prompt], 10, cache_salt="other")
        assert driver.engine.stats().prefix_tokens_hit == hit
    assert hit >= 64 + 64
    reference.check(prompt, first)
    reference.check(prompt, again)
    reference.check([*prompt, *first[:10]], longer)
    reference.check(prompt, other_salt)


def test_after_preemption(llama: Path, reference: GreedyReference) -> None:
    prompts = [prompt_of(length, seed=1) for length in (40, 45, 50, 55)]
    # Room for the prompts and little more, so that growing sequences push each other out.
    with drive(llama, num_blocks=18, max_num_batched_tokens=32) as driver:
        found = driver.generate(prompts, 60)
        assert driver.engine.stats().num_preemptions > 0
    for prompt, output in zip(prompts, found, strict=True):
        reference.check(prompt, output)


def test_other_block_sizes(llama: Path, reference: GreedyReference) -> None:
    prompts = [prompt_of(length) for length in (1, 7, 8, 9, 70)]
    for block_size in (8, 32):
        with drive(llama, block_size=block_size) as driver:
            for prompt, found in zip(prompts, driver.generate(prompts, 12), strict=True):
                reference.check(prompt, found)


@pytest.mark.parametrize("length", [15, 16, 17, 83])
def test_prefill_here_and_decode_there(llama: Path, reference: GreedyReference, length: int) -> None:
    """The handoff is made without its transport: one engine's blocks are copied into another's."""
    prompt = prompt_of(length)
    with drive(llama) as source, drive(llama) as target:
        (prefilled,) = source.wait(source.submit(prompt, 20, mode=Mode.PREFILL_ONLY))
        blocks = set_aside(target.engine, len(prefilled.block_ids))
        target.engine.cache.write_blocks(blocks, source.engine.cache.read_blocks(prefilled.block_ids))
        source.engine.release(prefilled.block_ids, Holder.LEASE)
        (decoded,) = target.wait(target.adopt(prompt, blocks, prefilled.token_ids[0], 20))
    assert len(decoded.token_ids) == 19
    reference.check(prompt, prefilled.token_ids + decoded.token_ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_blocks_held_before_does_not_matter(llama: Path, dtype: str) -> None:
    prompts = [prompt_of(length) for length in (1, 17, 40)]
    with drive(llama, dtype=dtype) as clean, drive(llama, dtype=dtype) as dirty:
        for block in range(dirty.engine.info.num_blocks):
            dirty.engine.cache.write_blocks([block], [b"\xff" * dirty.engine.cache.block_bytes])  # NaN everywhere
        assert dirty.generate(prompts, 30) == clean.generate(prompts, 30)
