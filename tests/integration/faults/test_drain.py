"""Tests workers that leave in order: no request is dropped."""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.v1 import control_pb2
from tests.support.equality import GreedyReference
from tests.support.phases import Phase, decoding, prefilling, reach, strike
from tests.support.processes import baton
from tests.support.real_cluster import LEFT_WITHIN_S, RealCluster
from tests.support.streams import keep_asking, load, mixed_jobs, streams

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]

PATIENT = 1
"""The router that takes no slow worker for a lost one."""
LONG = pytest.mark.proof
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")


async def test_drain_moves_what_is_left_at_the_deadline(cluster: RealCluster, reference: GreedyReference) -> None:
    """What another router has there is moved when the worker's own time is up, 2 s later: it ends
    its session in order. Workers are slow, so that there is something left then."""
    rng = random.Random(5)

    async def attempt() -> bool:
        long_jobs = mixed_jobs(rng, 4, range(50, 100), range(500, 550))
        async with (
            streams(cluster.routers[PATIENT], reference, long_jobs) as others,
            load(cluster, reference) as running,
        ):
            async with cluster["decode-0"].slowed(), cluster["decode-1"].slowed():
                worker_id = await reach(cluster, decoding, running)
                request = control_pb2.DrainRequest(worker_id=worker_id, deadline_ms=0)
                drained = await cluster.router.control.Drain(request, timeout=LEFT_WITHIN_S)
                await cluster[worker_id].left()
        await cluster.whole()
        assert running.num_retries >= drained.num_migrated
        return drained.num_migrated > 0 and others.num_retries > 0

    await strike(attempt)


@pytest.mark.parametrize("phase", [prefilling, decoding])
async def test_sigterm(cluster: RealCluster, reference: GreedyReference, phase: Phase) -> None:
    async def attempt() -> bool:
        async with load(cluster, reference, router=PATIENT) as running:
            await cluster[await reach(cluster, phase, running, PATIENT)].terminate()
        assert not running.num_retries, "what it had begun it finished"
        await cluster.whole()
        return True

    await strike(attempt)


@pytest.mark.parametrize("how", ["drained", pytest.param("terminated", marks=LONG)])
async def test_rolling_restart_under_load(cluster: RealCluster, reference: GreedyReference, how: str) -> None:
    """Clients of both routers ask while every worker is restarted, one after the other."""
    over = asyncio.Event()
    asking = [
        asyncio.create_task(keep_asking(router, reference, over, num_clients=2 - number))
        for number, router in enumerate(cluster.routers)
    ]
    for name in WORKERS:
        cluster.watch()
        pid = cluster[name].pid
        if how == "drained":
            await _drain(cluster, name)
            await cluster[name].left()
        else:
            await cluster[name].terminate()
        await cluster.whole()
        assert cluster[name].pid != pid
    over.set()
    await asyncio.gather(*asking)


async def _drain(cluster: RealCluster, worker_id: str) -> None:
    """Drains by the command line, at the patient router."""
    control_port = cluster[f"router-{PATIENT}"].control_port
    flags = ["--target", f"127.0.0.1:{control_port}", "--deadline", f"{LEFT_WITHIN_S:g}"]
    drained = await asyncio.to_thread(baton, ["drain", worker_id, *flags], cluster.temp, LEFT_WITHIN_S + 60)
    assert drained.returncode == 0, drained.stderr
