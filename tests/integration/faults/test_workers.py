"""Workers that are killed, stopped and cut off in every phase, while clients stream: no token is lost, repeated or
changed, and nothing is left held."""

from __future__ import annotations

import asyncio

import pytest

from baton.v1 import control_pb2
from tests.equality import GreedyReference
from tests.phases import Phase, decoding, handing_over, prefilling, queued, reach, reaches, taking_over
from tests.proxy import Fault
from tests.real_cluster import RealCluster
from tests.streams import load

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]

NUM_JOBS = {False: 10, True: 20}
"""By whether there must be a queue."""
LOST_WITHIN_S = 4.0
"""Routers wait for 2 s of silence."""
CUT_PAIR_WITHIN_S = 40.0
"""Keepalive takes 8 s, each of two attempts with a new connection 5 s; the rest is the work itself."""


@pytest.mark.parametrize("phase", [queued, prefilling, handing_over, taking_over, decoding])
async def test_killed(cluster: RealCluster, reference: GreedyReference, phase: Phase) -> None:
    async with load(cluster, reference, num_jobs=NUM_JOBS[phase is queued]) as running:
        await cluster.restart(await reach(cluster, phase))
    assert running.num_retries


@pytest.mark.parametrize("phase", [queued, prefilling, handing_over, taking_over, decoding])
async def test_stopped_and_continued(cluster: RealCluster, reference: GreedyReference, phase: Phase) -> None:
    async with load(cluster, reference, num_jobs=NUM_JOBS[phase is queued]) as running:
        victim = await reach(cluster, phase)
        with cluster[victim].stopped():
            await reaches(cluster, victim, control_pb2.WORKER_STATE_SUSPECT, LOST_WITHIN_S)
            await running.any_done()  # the others have taken over before it wakes up
    assert running.num_retries


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        (Fault.STALL, prefilling),
        (Fault.STALL, decoding),
        (Fault.DROP, taking_over),
        (Fault.RESET, handing_over),
        (Fault.RESET, decoding),
    ],
)
async def test_cut_off_from_the_router(
    cluster: RealCluster, reference: GreedyReference, fault: Fault, phase: Phase
) -> None:
    async with load(cluster, reference) as running:
        victim = await reach(cluster, phase)
        with cluster.cut(fault, victim, ["router-0"]):
            await reaches(cluster, victim, control_pb2.WORKER_STATE_SUSPECT, LOST_WITHIN_S)
            await running.any_done()
    assert running.num_retries


@pytest.mark.parametrize("fault", list(Fault))
async def test_cut_off_from_each_other(cluster: RealCluster, reference: GreedyReference, fault: Fault) -> None:
    async with load(cluster, reference) as running:
        source = await reach(cluster, handing_over)
        with cluster.cut(fault, source, ["decode-0", "decode-1"]):
            async with asyncio.timeout(CUT_PAIR_WITHIN_S):
                await running.all_done()
    assert running.num_retries
