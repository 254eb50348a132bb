"""More than the cluster can do: what is refused is refused at once, what is accepted is finished."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any

import grpc
import pytest

from services.core.errors import Overloaded
from services.rpc.status import from_call
from tests.cluster import Answer
from tests.equality import GreedyReference
from tests.patience import slowness
from tests.real_cluster import RealCluster
from tests.streams import Job, mixed_jobs

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]

MAX_QUEUE = 24
REFUSED_WITHIN_S = 2.0


async def test_three_times_too_much(cluster: RealCluster, reference: GreedyReference) -> None:
    """Two pools of 96 blocks and a queue of 24 take about 40 of these at a time."""
    jobs = mixed_jobs(random.Random(3), 120, range(50, 150), range(10, 40))
    lengths: list[int] = []
    watching = asyncio.create_task(_watch_queue(cluster, lengths))
    outcomes = await asyncio.gather(*(_ask(cluster, job) for job in jobs))
    watching.cancel()
    slow = slowness()
    accepted = [(job, answer) for job, (answer, _) in zip(jobs, outcomes, strict=True) if isinstance(answer, Answer)]
    refused = [(error, took_s) for error, took_s in outcomes if not isinstance(error, Answer)]
    for job, answer in accepted:
        job.check(reference, answer)
    for error, took_s in refused:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        meaning = from_call(error)
        assert isinstance(meaning, Overloaded)
        assert meaning.retry_after_s is not None
        assert took_s < REFUSED_WITHIN_S * max(1.0, 3 * (slow - 1))
    assert len(accepted) >= MAX_QUEUE
    assert len(refused) >= 40
    assert 0 < max(lengths) <= MAX_QUEUE


async def _ask(cluster: RealCluster, job: Job) -> tuple[Any, float]:
    """The answer or the error, and seconds until it was there."""
    began_s = time.monotonic()
    try:
        return await cluster.router.stream(job.request()), time.monotonic() - began_s
    except grpc.aio.AioRpcError as error:
        return error, time.monotonic() - began_s


async def _watch_queue(cluster: RealCluster, lengths: list[int]) -> None:
    while True:
        lengths.append((await cluster.router.status()).num_queued)
        await asyncio.sleep(0.05)


async def test_storm_of_aborts(cluster: RealCluster, reference: GreedyReference) -> None:
    """Half of 500 requests are cancelled, each at a random token; what is left of them is gone within 5 s."""
    rng = random.Random(4)
    jobs = mixed_jobs(rng, 500, range(20, 200), range(5, 30))
    router = cluster.routers[1]  # its queue takes them all

    async def impatient(job: Job) -> None:
        call = router.inference.GenerateStream(job.request())
        patience = rng.randrange(5)
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            async for _ in call:
                patience -= 1
                if patience < 0:
                    call.cancel()

    async def patient(job: Job) -> None:
        job.check(reference, await router.stream(job.request()))

    await asyncio.gather(*((impatient if number % 2 else patient)(job) for number, job in enumerate(jobs)))
    await cluster.idle()
