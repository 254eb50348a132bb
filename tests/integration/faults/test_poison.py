"""Tests that a request under which every worker dies ends after three, and the cluster goes on without it."""

from __future__ import annotations

import asyncio
import contextlib
import random

import grpc
import pytest

from services.core.errors import WorkerFailed
from services.rpc.status import from_call
from tests.support.equality import GreedyReference
from tests.support.proxy import Fault
from tests.support.real_cluster import RealCluster, Status
from tests.support.streams import load, mixed_jobs

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]

PATIENT = 1
"""The router that takes no slow worker for a lost one: every crash it counts is a killed worker."""
DECODERS = ("decode-0", "decode-1")


async def test_three_crashes_without_progress(cluster: RealCluster, reference: GreedyReference) -> None:
    [job] = mixed_jobs(random.Random(7), 1, range(100, 101), range(20, 21))
    with contextlib.ExitStack() as stack:
        for source in ("prefill-0", "prefill-1"):  # so that the handoff is caught before it gives a token
            stack.enter_context(cluster.cut(Fault.STALL, source, DECODERS))
        poison = asyncio.create_task(cluster.routers[PATIENT].stream(job.request()))
        num_killed = await _kill_whoever_takes_it(cluster, poison)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await poison
    assert num_killed == 3
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    error = from_call(caught.value)
    assert isinstance(error, WorkerFailed)
    assert error.retry_after_s is not None
    await cluster.whole()
    async with load(cluster, reference, num_jobs=2):
        pass


async def _kill_whoever_takes_it(cluster: RealCluster, poison: asyncio.Task[object]) -> int:
    """Kills and restarts decode workers until the request is over; how many."""
    num_killed = 0
    async with asyncio.TaskGroup() as restarts:
        while not poison.done():
            worker_id = _decoder_of_the_request(await cluster.routers[PATIENT].status())
            if worker_id is not None and cluster[worker_id].pid:
                num_killed += 1
                cluster.watch()
                await cluster[worker_id].kill()
                restarts.create_task(cluster[worker_id].start())
            await asyncio.sleep(0.02)
    return num_killed


def _decoder_of_the_request(status: Status) -> str | None:
    """It has no other; what decode workers import besides are canaries."""
    workers = (each.worker.worker_id for each in status.workers if each.num_requests)
    return next((worker_id for worker_id in workers if worker_id in DECODERS), None)
