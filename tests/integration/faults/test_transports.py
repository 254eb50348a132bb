"""Tests processes that are killed while blocks are copied between them by a transport other than shared memory, which
workers on one host take by themselves: no token is lost, repeated or changed, and nothing is left held."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import pytest_asyncio

from services.kvtransfer.transports import nixl_agent
from tests.integration.faults.conftest import FLAGS, ROUTERS
from tests.support.equality import GreedyReference
from tests.support.phases import Phase, handing_over, parked, parking, reach, strike, taking_over
from tests.support.real_cluster import RealCluster, Status, real_cluster
from tests.support.streams import Streams, mixed_jobs, streams

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]

RANDOM = random.Random(15)
NUM_JOBS = 6
NIXL = pytest.param(
    "nixl",
    marks=(
        pytest.mark.proof,
        pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed"),
    ),
)


@pytest_asyncio.fixture(scope="module", loop_scope="package", params=["tcp", NIXL])
async def shared(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RealCluster]:
    """Has a decode worker with room for one or two of the prompts. A transport that is named is taken, or none."""
    named = ("--transport", request.param)
    flags = {"decode-0": ("--kv-blocks", "24"), "store-0": ("--kvtransfer-bytes", "64MiB", *named)}
    temp = tmp_path_factory.mktemp("temp")
    workers = ("prefill-0", "decode-0", "store-0")
    async with real_cluster(model, temp, workers, *FLAGS, *named, routers=ROUTERS, flags_of=flags) as cluster:
        yield cluster


def crowd(cluster: RealCluster, reference: GreedyReference, router: int = 0) -> AbstractAsyncContextManager[Streams]:
    jobs = mixed_jobs(RANDOM, NUM_JOBS, range(120, 250), range(60, 100))
    return streams(cluster.routers[router], reference, jobs)


async def kill_in(cluster: RealCluster, reference: GreedyReference, phase: Phase) -> bool:
    """Kills the worker that is in the phase, and starts it again. Returns whether that has struck something: a handoff
    that a store was to take stays where it is, and so need not be computed again. Raises Missed."""
    async with crowd(cluster, reference) as running:
        await cluster.restart(await reach(cluster, phase, running))
    return phase is parking or running.num_retries > 0


def unparking(status: Status) -> str | None:
    """Returns a store from which a decode worker takes a handoff."""
    return parked(status) if taking_over(status) and handing_over(status) is None else None


@pytest.mark.parametrize("phase", [handing_over, taking_over, parking, unparking])
async def test_an_end_of_a_copy_that_is_killed(cluster: RealCluster, reference: GreedyReference, phase: Phase) -> None:
    """It is the source, the destination, and a store as either of them."""
    await strike(lambda: kill_in(cluster, reference, phase))


async def test_a_source_that_is_killed_while_a_store_takes_its_handoff(
    cluster: RealCluster, reference: GreedyReference
) -> None:
    async def attempt() -> bool:
        async with crowd(cluster, reference) as running:
            await reach(cluster, parking, running)
            await cluster.restart("prefill-0")
        return running.num_retries > 0

    await strike(attempt)
