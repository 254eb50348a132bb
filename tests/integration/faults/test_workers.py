"""Workers that are killed, stopped and cut off in every phase, while clients stream: no token is lost, repeated or
changed, and nothing is left held."""

from __future__ import annotations

import pytest

from baton.v1 import control_pb2
from tests.equality import GreedyReference
from tests.phases import (
    Phase,
    decoding,
    handing_over,
    prefilling,
    queued,
    reach,
    reaches,
    strike,
    taking_over,
)
from tests.proxy import Fault
from tests.real_cluster import RealCluster
from tests.streams import load

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]

NUM_JOBS = {False: 10, True: 20}
"""By whether there must be a queue."""
LOST_WITHIN_S = 4.0
"""Routers wait for 2 s of silence."""
CUT_PAIR_WITHIN_S = 40.0
"""Keepalive takes 8 s, each of two attempts with a new connection 5 s; the rest is the work itself."""
LONG = pytest.mark.faults_long


@pytest.mark.parametrize("phase", [queued, prefilling, handing_over, taking_over, decoding])
async def test_killed(cluster: RealCluster, reference: GreedyReference, phase: Phase) -> None:
    async def attempt() -> bool:
        async with load(cluster, reference, num_jobs=NUM_JOBS[phase is queued]) as running:
            await cluster.restart(await reach(cluster, phase, running))
        return running.num_retries > 0

    await strike(attempt)


@pytest.mark.parametrize("phase", [pytest.param(queued, marks=LONG), prefilling, handing_over, taking_over, decoding])
async def test_stopped_and_continued(cluster: RealCluster, reference: GreedyReference, phase: Phase) -> None:
    async def attempt() -> bool:
        async with load(cluster, reference, num_jobs=NUM_JOBS[phase is queued]) as running:
            victim = await reach(cluster, phase, running)
            with cluster[victim].stopped():
                await reaches(cluster, victim, control_pb2.WORKER_STATE_SUSPECT, LOST_WITHIN_S)
                await running.any_done()  # the others have taken over before it wakes up
        return running.num_retries > 0

    await strike(attempt)


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        (Fault.STALL, prefilling),
        pytest.param(Fault.STALL, decoding, marks=LONG),
        (Fault.DROP, taking_over),
        pytest.param(Fault.RESET, handing_over, marks=LONG),
        (Fault.RESET, decoding),
    ],
)
async def test_cut_off_from_the_router(
    cluster: RealCluster, reference: GreedyReference, fault: Fault, phase: Phase
) -> None:
    async def attempt() -> bool:
        async with load(cluster, reference) as running:
            victim = await reach(cluster, phase, running)
            with cluster.cut(fault, victim, ["router-0"]):
                await reaches(cluster, victim, control_pb2.WORKER_STATE_SUSPECT, LOST_WITHIN_S)
                await running.any_done()
        return running.num_retries > 0

    await strike(attempt)


@pytest.mark.parametrize(
    "fault", [pytest.param(Fault.STALL, marks=LONG), pytest.param(Fault.DROP, marks=LONG), Fault.RESET]
)
async def test_cut_off_from_each_other(cluster: RealCluster, reference: GreedyReference, fault: Fault) -> None:
    async def attempt() -> bool:
        async with load(cluster, reference) as running:
            source = await reach(cluster, handing_over, running)
            with cluster.cut(fault, source, ["decode-0", "decode-1"]):
                await running.all_done(CUT_PAIR_WITHIN_S)
        return running.num_retries > 0

    await strike(attempt)


async def test_all_workers_killed_at_once(cluster: RealCluster, reference: GreedyReference) -> None:
    """One fault that takes the whole cluster is not three faults of each request."""

    async def attempt() -> bool:
        async with load(cluster, reference) as running:
            await reach(cluster, handing_over, running)
            await cluster.restart("prefill-0", "prefill-1", "decode-0", "decode-1")
        return running.num_retries > 0

    await strike(attempt)
