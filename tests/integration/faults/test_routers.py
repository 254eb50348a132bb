"""Routers die, come back and share workers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from tests.support.cluster import Answer
from tests.support.equality import GreedyReference
from tests.support.phases import decoding, reach
from tests.support.real_cluster import RealCluster
from tests.support.streams import Streams, load, mixed_jobs

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]

RANDOM = random.Random(2)
FREE_WITHIN_S = 2.0
PATIENT = 1
"""The router that takes no slow worker for a lost one."""


async def test_workers_free_everything_and_rejoin(cluster: RealCluster, reference: GreedyReference) -> None:
    doomed = Streams(cluster.router, mixed_jobs(RANDOM, 10, range(150, 550), range(50, 100)))
    await reach(cluster, decoding, doomed)
    cluster.watch()
    await cluster["router-0"].kill()
    await cluster.idle(FREE_WITHIN_S)
    _check_doomed(await asyncio.gather(*doomed.tasks, return_exceptions=True))
    await cluster["router-0"].start()
    await cluster.whole()
    async with load(cluster, reference, num_jobs=4):
        pass


async def test_two_routers_share_the_workers(cluster: RealCluster, reference: GreedyReference) -> None:
    """The router that lives does not notice the end of the other, and does not lose a token."""
    async with load(cluster, reference, num_jobs=6, router=PATIENT) as lucky:
        doomed = Streams(cluster.router, mixed_jobs(RANDOM, 6, range(150, 550), range(50, 100)))
        await cluster.router.until(lambda status: status.num_decoding > 0, "some of the doomed decode")
        cluster.watch()
        await cluster["router-0"].kill()
        _check_doomed(await asyncio.gather(*doomed.tasks, return_exceptions=True))
        await cluster["router-0"].start()
    assert not lucky.num_retries


def _check_doomed(outcomes: list[Any]) -> None:
    """Asserts that all have ended, some perhaps finished, and no other with an error than this one."""
    errors = [outcome for outcome in outcomes if not isinstance(outcome, Answer)]
    assert errors
    for error in errors:
        assert isinstance(error, grpc.aio.AioRpcError), error
        assert error.code() is grpc.StatusCode.UNAVAILABLE
