"""Tests with real processes that what was computed once outlives all workers: they have it back from a store."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from baton.v1 import inference_pb2
from tests.integration.faults.conftest import FLAGS, ROUTERS
from tests.support.equality import GreedyReference
from tests.support.models import VOCAB_SIZE
from tests.support.phases import strike
from tests.support.real_cluster import READY_WITHIN_S, RealCluster, Status, real_cluster
from tests.support.streams import Job

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]

RANDOM = random.Random(16)
SHARED_TOKENS, OWN_TOKENS, BLOCK = 800, 40, 16
LARGE = ("--kv-blocks", "256")
"""A quarter of it is lent, or brought, at once."""
WORKERS = ("prefill-0", "decode-0")


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    flags = {"store-0": ("--kvtransfer-bytes", "64MiB")}
    temp = tmp_path_factory.mktemp("temp")
    async with real_cluster(
        model, temp, (*WORKERS, "store-0"), *FLAGS, *LARGE, routers=ROUTERS[1:], flags_of=flags
    ) as cluster:
        yield cluster


def drawn(num_tokens: int) -> tuple[int, ...]:
    return tuple(RANDOM.choices(range(3, VOCAB_SIZE), k=num_tokens))


def num_kept(status: Status) -> int:
    """Returns how many blocks the store has."""
    return sum(each.load.blocks_cached for each in status.workers if each.worker.worker_id == "store-0")


async def test_a_system_prompt_outlives_the_workers_that_computed_it(
    cluster: RealCluster, reference: GreedyReference
) -> None:
    """It is struck again where a busy machine brings it more slowly than it computes it."""

    async def ask(prompt: tuple[int, ...]) -> inference_pb2.PromptInfo:
        job = Job(prompt, 6)
        answer = await cluster.router.stream(job.request())
        job.check(reference, answer)
        assert answer.prompt_info is not None
        return answer.prompt_info

    async def attempt() -> bool:
        system = drawn(SHARED_TOKENS)
        before = num_kept(await cluster.router.status())
        assert (await ask(system + drawn(OWN_TOKENS))).cached_tokens == 0
        enough = before + SHARED_TOKENS // BLOCK
        await cluster.router.until(lambda status: num_kept(status) >= enough, "it is kept", READY_WITHIN_S)
        await cluster.restart(*WORKERS)
        await cluster.whole()
        await ask(drawn(OWN_TOKENS))  # by which the workers know what a prompt costs to compute
        return (await ask(system + drawn(OWN_TOKENS))).cached_tokens == SHARED_TOKENS

    await strike(attempt)
