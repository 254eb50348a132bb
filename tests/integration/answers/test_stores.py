"""Tests that a cluster with a store answers as one without, where decode workers have no room for what is computed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from baton.v1 import types_pb2
from services.router.coordinator.config import CoordinatorConfig
from tests.support.cluster import Answer, Cluster, receive_several, running_cluster
from tests.support.cluster import greedy_request as asked
from tests.support.models import tiny_model
from tests.support.patience import HANG_S
from tests.support.stores import running_store
from tests.support.workers import DECODE, MIXED, PREFILL, until

PROMPTS = [[5 + (7 * number + index) % 250 for index in range(70)] for number in range(6)]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@contextlib.asynccontextmanager
async def crowded(model: Path, num_blocks: int = 64, transport: str = "auto") -> AsyncIterator[Cluster]:
    """Yields a cluster whose decode worker has room for one of the prompts; the last of its workers is a store."""
    each = [{"kv_blocks": 64}, {"kv_blocks": 8}]
    config = {"transport": transport, "checksums": "always"}
    with pytest.MonkeyPatch.context() as patch:
        # On a fast machine the decode worker may have room again before a handoff is parked.
        patch.setattr("services.router.main.CoordinatorConfig", partial(CoordinatorConfig, park_after_s=0.0))
        async with running_cluster(model, [PREFILL, DECODE], each=each, **config) as cluster:
            routers = (cluster.router.control_address,)
            async with running_store(
                cluster.workers[0], num_blocks, router=routers, worker_id="s", silence_s=HANG_S, **config
            ) as store:
                cluster.workers.append(store)
                await until(lambda: cluster.num_ready == 3, "the store is ready", HANG_S)
                yield cluster
                await cluster.idle()
                cluster.workers.pop()


async def whole(model: Path) -> list[Answer]:
    async with running_cluster(model, [MIXED]) as cluster:
        return [await cluster.greedy(prompt, MAX_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_answers_that_waited_at_a_store_are_the_same(model: Path, transport: str) -> None:
    async with crowded(model, transport=transport) as cluster:
        answers = await asyncio.gather(*(cluster.greedy(prompt, MAX_TOKENS) for prompt in PROMPTS))
        num_parked = sum(cluster.workers[2].tally.imports.values())
        num_computed = cluster.workers[0].engine.tally.prefill_tokens
    assert num_parked, "the decode worker has room for one at a time"
    assert num_computed == sum(map(len, PROMPTS)), "nothing is computed twice"
    expected = await whole(model)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


async def test_several_answers_wait_at_a_store_together(model: Path) -> None:
    requests = [asked(prompt, MAX_TOKENS, n=3) for prompt in PROMPTS[:3]]
    for request in requests:
        request.sampling.CopyFrom(types_pb2.SamplingParams(temperature=3.0, seed=11))
    async with crowded(model) as cluster:
        calls = (receive_several(cluster.inference.GenerateStream(request, timeout=60.0), 3) for request in requests)
        answers = await asyncio.gather(*calls)
        assert sum(cluster.workers[2].tally.imports.values())
    async with running_cluster(model, [MIXED]) as cluster:
        for request, those in zip(requests, answers, strict=True):
            same = await receive_several(cluster.inference.GenerateStream(request, timeout=60.0), 3)
            assert [answer.token_ids[0] for answer in those] == [answer.token_ids[0] for answer in same]


async def test_a_store_without_room_changes_nothing(model: Path) -> None:
    async with crowded(model, num_blocks=16) as cluster:
        answers = await asyncio.gather(*(cluster.greedy(prompt, MAX_TOKENS) for prompt in PROMPTS))
        assert all(len(answer.token_ids) == MAX_TOKENS for answer in answers)


async def test_a_store_that_ends_fails_no_request(model: Path) -> None:
    async with crowded(model) as cluster:
        answers = [asyncio.create_task(cluster.greedy(prompt, MAX_TOKENS)) for prompt in PROMPTS]
        store = cluster.workers[2]
        await until(lambda: len(store.leases) > 0, "a handoff waits at the store", HANG_S, pause_s=0)
        store.sessions.end_all()
        expected = await whole(model)
        for answer, same in zip(await asyncio.gather(*answers), expected, strict=True):
            assert answer.token_ids == same.token_ids
