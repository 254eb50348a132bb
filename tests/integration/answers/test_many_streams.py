"""Tests 200 concurrent streams of mixed lengths on pools too small to hold them: all finish, none hangs or starves."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import greedy_request, running_cluster
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.workers import DECODE, MIXED, PREFILL

pytestmark = pytest.mark.long

NUM_STREAMS = 200
SMALL, ROOMY = 48, 1500

POOLS: dict[str, tuple[list[Any], list[dict[str, Any]]]] = {
    "prefill's": ([PREFILL, DECODE], [{"kv_blocks": SMALL}, {"kv_blocks": ROOMY}]),
    "decode's": ([PREFILL, DECODE], [{"kv_blocks": ROOMY}, {"kv_blocks": SMALL}]),
    "both": ([PREFILL, DECODE], [{"kv_blocks": SMALL}, {"kv_blocks": SMALL}]),
    "a mixed one's": ([MIXED], [{"kv_blocks": SMALL}]),
    "two mixed ones'": ([MIXED, MIXED], [{"kv_blocks": SMALL}, {"kv_blocks": SMALL}]),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("many"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pools", POOLS)
async def test_all_finish(model: Path, pools: str) -> None:
    roles, each = POOLS[pools]
    chance = random.Random(1)
    shapes = [(chance.choice((1, 15, 16, 17, 60, 200, 500)), chance.choice((1, 2, 17, 40, 120))) for _ in range(200)]
    async with running_cluster(
        model, roles, each=each, max_num_batched_tokens=256, max_num_seqs=32, silence_s=30.0
    ) as cluster:
        prompts = [chance.choices(range(3, VOCAB_SIZE), k=length) for length, _ in shapes]
        requests = [
            greedy_request(prompt, max_tokens, priority=n % 3)
            for n, (prompt, (_, max_tokens)) in enumerate(zip(prompts, shapes, strict=True))
        ]
        # No deadline is in question; it takes some 20 s.
        answers = await asyncio.gather(*(cluster.stream(request, timeout_s=280) for request in requests))
        for answer, (length, max_tokens) in zip(answers, shapes, strict=True):
            assert len(answer.token_ids) == max_tokens
            assert answer.completion is not None
            assert answer.completion.usage.prompt_tokens == length
        assert len(answers) == NUM_STREAMS
        # The same prompts one by one give the same answers: nobody read another's blocks.
        for number in chance.sample(range(NUM_STREAMS), 5):
            alone = await cluster.stream(requests[number])
            assert alone.token_ids[:8] == answers[number].token_ids[:8]
