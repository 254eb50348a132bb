"""Tests `--kv-dtype`: keys and values in another type than the activations, in an engine and across a handoff."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from services.cli.status import text
from services.rpc.plain import plain
from tests.support.cluster import running_cluster
from tests.support.engine_driver import drive
from tests.support.equality import GreedyReference
from tests.support.examples import combinations
from tests.support.models import FAMILIES, VOCAB_SIZE, tiny_model
from tests.support.rounded_kv import OVER_INT8
from tests.support.workers import DECODE, PREFILL

MAX_TOKENS = 16
ROUNDED_GAP_BOUND = 0.02
"""Logits, against the plain path over rows that are rounded alike: a number that lies between two values may become the
other one, where sums of floats are in another order."""
GAP_BOUND = {"bfloat16": 0.1, "float16": 0.02, "int8": 0.2}
"""Logits, of models whose logits spread by about 1: what rounding keys, values and queries to these types may move."""


def prompts() -> list[list[int]]:
    return [random.Random(f"kv {length}").choices(range(3, VOCAB_SIZE), k=length) for length in (1, 16, 17, 65)]


@pytest.mark.parametrize(("family", "kv_dtype"), combinations(FAMILIES, list(GAP_BOUND)))
def test_the_same_is_said_with_less_memory(family: str, kv_dtype: str, tmp_path: Path) -> None:
    model = tiny_model(family, tmp_path)
    reference = GreedyReference(model, GAP_BOUND[kv_dtype])
    with drive(model, kv_dtype=kv_dtype) as driver:
        assert driver.engine.info.dtype == kv_dtype
        assert "float32 activations" in driver.engine.info.numerics
        fewer = driver.engine.cache.block_bytes
        head_dim = driver.engine.info.head_dim
        for prompt, found in zip(prompts(), driver.generate(prompts(), MAX_TOKENS), strict=True):
            reference.check_at_once(prompt, found)
    with drive(model) as driver:
        row_bytes = head_dim + 4 if kv_dtype == "int8" else 2 * head_dim
        assert driver.engine.cache.block_bytes * row_bytes == fewer * 4 * head_dim


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_a_handoff(transport: str, kv_dtype: str, tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path)
    reference = GreedyReference(model, GAP_BOUND[kv_dtype])
    async with running_cluster(model, [PREFILL, DECODE], kv_dtype=kv_dtype, transport=transport) as cluster:
        answers = await asyncio.gather(*(cluster.greedy(prompt, MAX_TOKENS) for prompt in prompts()))
    for prompt, answer in zip(prompts(), answers, strict=True):
        assert answer.completion is not None
        assert (answer.completion.workers.prefill, answer.completion.workers.decode) == ("w0", "w1")
        reference.check_at_once(prompt, answer.token_ids)


async def test_workers_of_different_types_do_not_pair(tmp_path: Path) -> None:
    each = [{"kv_dtype": kv_dtype} for kv_dtype in ("auto", "bfloat16", "float16", "int8")]
    async with running_cluster(tiny_model("llama", tmp_path), [PREFILL, *[DECODE] * 3], each=each) as cluster:
        status = await cluster.status()
        assert not status.pairs
        assert len({worker.worker.fingerprint.kv for worker in status.workers}) == 4
        assert "w3: torch; float32 weights, float32 activations; int8 KV; " in text("", plain(status))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
async def test_in_8_bits_split_equals_unsplit(family: str, tmp_path: Path) -> None:
    """A row is rounded on its own, so neither chunks, a handoff, nor a prefix that was cached change what is kept. One
    of the families caps its scores softly."""
    model = tiny_model(family, tmp_path)
    with drive(model, kv_dtype="int8") as driver:
        unsplit = driver.generate(prompts(), MAX_TOKENS)
        assert driver.generate(prompts(), MAX_TOKENS) == unsplit, "from the prefix cache"
    async with running_cluster(model, [PREFILL, DECODE], kv_dtype="int8", max_num_batched_tokens=24) as cluster:
        answers = await asyncio.gather(*(cluster.greedy(prompt, MAX_TOKENS) for prompt in prompts()))
    assert [list(answer.token_ids) for answer in answers] == [list(tokens) for tokens in unsplit]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_in_8_bits_after_preemption(family: str, tmp_path: Path) -> None:
    """What was preempted is computed again, in chunks, over rows that were rounded again; with a soft cap, too."""
    model = tiny_model(family, tmp_path)
    reference = GreedyReference(model, ROUNDED_GAP_BOUND)
    reference.model.set_attn_implementation(OVER_INT8)
    each = [random.Random(f"preempted {length}").choices(range(3, VOCAB_SIZE), k=length) for length in (40, 45, 50, 55)]
    # Room for the prompts and little more, so that growing sequences push each other out.
    with drive(model, kv_dtype="int8", num_blocks=18, max_num_batched_tokens=32) as driver:
        outputs = driver.generate(each, 60)
        assert driver.engine.stats().num_preemptions > 0
    for prompt, found in zip(each, outputs, strict=True):
        reference.check_at_once(prompt, found)
    assert reference.num_near_ties * 20 <= reference.num_compared
