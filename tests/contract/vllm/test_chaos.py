"""Tests everything at once: requests with common beginnings come and are cancelled, vLLM takes blocks and loads fail.
No answer that ends is wrong, and nothing is held afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import grpc
import pytest

from tests.support.cluster import Cluster, running_cluster
from tests.support.scripted_memory import script
from tests.support.scripted_vllm_engine import VOCAB_SIZE, ScriptedVllm
from tests.support.workers import DECODE, MIXED, PREFILL, Roles

pytestmark = pytest.mark.process

PROMPT = [5 + i * i % 250 for i in range(200)]
NUM_REQUESTS = 60


async def one(cluster: Cluster, randomness: random.Random) -> bool:
    """Runs a request, and returns whether it was answered to its end."""
    prompt = [*PROMPT[: randomness.choice([0, 16, 90, 150])], *(randomness.randrange(5, 250) for _ in range(9))]
    num_tokens = randomness.choice([1, 3, 20])
    await asyncio.sleep(randomness.random() * 2.0)
    answer = asyncio.ensure_future(cluster.greedy(prompt, num_tokens))
    if randomness.random() < 0.3:
        await asyncio.wait([answer], timeout=randomness.random() * 0.03)
        answer.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        found = await answer
        assert found.token_ids == script(prompt, num_tokens, VOCAB_SIZE)
        return True
    return False


async def trouble(vllm: ScriptedVllm, randomness: random.Random) -> None:
    while True:
        await asyncio.sleep(randomness.random() * 0.6)
        vllm.controls.set(randomness.choice(["preempt", "fail-load"]))


@pytest.mark.parametrize("roles", [[PREFILL, DECODE], [MIXED, MIXED], [PREFILL, PREFILL, DECODE, DECODE]])
async def test_all_at_once(model: Path, vllm: ScriptedVllm, roles: list[Roles]) -> None:
    randomness = random.Random(len(roles))
    async with running_cluster(model, roles, load=vllm.load, kv_blocks=40, max_num_seqs=6) as cluster:
        troubled = asyncio.create_task(trouble(vllm, randomness))
        ended = await asyncio.gather(
            *(one(cluster, random.Random(number)) for number in range(NUM_REQUESTS)), return_exceptions=True
        )
        troubled.cancel()
        for name in ("preempt", "fail-load"):
            vllm.controls.clear(name)
        for error in ended:
            if isinstance(error, BaseException):
                assert isinstance(error, grpc.aio.AioRpcError), "each failed three times"
                assert error.code() is grpc.StatusCode.UNAVAILABLE
        num_answered = sum(each is True for each in ended)
        assert NUM_REQUESTS // 2 < num_answered < NUM_REQUESTS, "most are answered, and some were cancelled"
        await cluster.idle()
        assert (await cluster.greedy(PROMPT, 5)).token_ids == script(PROMPT, 5, VOCAB_SIZE)
