"""Tests a cluster whose workers stand on hosts of their own, over a link so slow that a transfer takes as long as what
befalls its ends: no token is lost, repeated or changed, nothing hangs, and nothing is left held."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import pytest_asyncio

from baton.v1 import types_pb2
from benchmarks.hosts import CannotSeparate
from tests.integration.faults.conftest import ALL
from tests.support.equality import GreedyReference
from tests.support.models import tiny_model
from tests.support.phases import Phase, handing_over, reach, strike, taking_over
from tests.support.separate_hosts import SeparateCluster, separate_cluster
from tests.support.streams import Streams, mixed_jobs, streams

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

RATE = "24mbit"
"""3 MB/s."""
FLAGS = ("--dtype", "float32", "--threads", "1", "--kv-blocks", "192", "--max-num-batched-tokens", "1024")
PROMPT_TOKENS = range(690, 720)
"""17 MB of KV, computed in a single chunk: 6 s on the link."""
RANDOM = random.Random(39)
CUT_S = 3.0
"""Longer than the router waits for a silent worker."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model of much KV: 24 KB a token."""
    shape = {"num_hidden_layers": 12, "num_key_value_heads": 4, "head_dim": 64}
    return tiny_model("llama", tmp_path_factory.mktemp("models"), **shape)


@pytest.fixture(scope="module")
def reference(model: Path) -> GreedyReference:
    return GreedyReference(model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SeparateCluster]:
    temp, workers = tmp_path_factory.mktemp("temp"), ("prefill-0", "decode-0")
    try:
        async with separate_cluster(model, temp, workers, *FLAGS, router_flags=ALL, rate=RATE) as cluster:
            yield cluster
    except CannotSeparate as error:
        pytest.skip(f"workers were not put on hosts of their own: {error}")


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: SeparateCluster) -> AsyncIterator[SeparateCluster]:
    await shared.whole()
    await shared.idle()
    yield shared
    await shared.whole()
    await shared.idle()


def crowd(
    cluster: SeparateCluster, reference: GreedyReference, num_jobs: int = 1
) -> AbstractAsyncContextManager[Streams]:
    return streams(cluster.router, reference, mixed_jobs(RANDOM, num_jobs, PROMPT_TOKENS, range(20, 30)))


async def test_kv_crosses_by_tcp_without_being_told_to(cluster: SeparateCluster, reference: GreedyReference) -> None:
    """Two at once: each has half of the link."""
    async with crowd(cluster, reference, 2) as running:
        pass
    assert running.num_retries == 0
    for (answer,) in running.answers:
        assert answer.completion is not None
        assert answer.completion.timings.transport == types_pb2.TRANSPORT_TCP


@pytest.mark.parametrize("phase", [handing_over, taking_over])
async def test_an_end_of_a_transfer_that_is_killed(
    cluster: SeparateCluster, reference: GreedyReference, phase: Phase
) -> None:
    async def attempt() -> bool:
        async with crowd(cluster, reference) as running:
            await cluster.restart(await reach(cluster, phase, running))
        return running.num_retries > 0

    await strike(attempt)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_an_end_of_a_transfer_that_is_cut_off(
    cluster: SeparateCluster, reference: GreedyReference, name: str
) -> None:
    async def attempt() -> bool:
        async with crowd(cluster, reference) as running:
            await reach(cluster, handing_over, running)
            with cluster.hosts.cut(name):
                await asyncio.sleep(CUT_S)
        return running.num_retries > 0

    await strike(attempt)
