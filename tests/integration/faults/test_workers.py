"""Tests workers that are killed, stopped and cut off in every phase, while clients stream: no token is lost, repeated
or changed, and nothing is left held."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from baton.v1 import control_pb2
from tests.support.equality import GreedyReference
from tests.support.phases import (
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
from tests.support.proxy import Fault
from tests.support.real_cluster import RealCluster, Status
from tests.support.streams import load, mixed_jobs, streams

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]

NUM_JOBS = {False: 10, True: 20}
"""By whether there must be a queue."""
LOST_WITHIN_S = 4.0
"""Routers wait for 2 s of silence."""
CUT_PAIR_WITHIN_S = 40.0
"""Keepalive takes 8 s, each of two attempts with a new connection 5 s; the rest is the work itself."""
LONG = pytest.mark.proof
DECODERS = ("decode-0", "decode-1")


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
                await reaches(cluster, victim, control_pb2.WORKER_STATE_DOWN, LOST_WITHIN_S)
                await running.any_done()  # the others have taken over before it wakes up
        return running.num_retries > 0

    await strike(attempt)


PHASES = (queued, prefilling, handing_over, taking_over, decoding)
IN_MAKE_TEST = {(Fault.STALL, prefilling), (Fault.DROP, taking_over), (Fault.RESET, decoding)}
"""Each fault once, each in another phase; `make faults` has them all."""
PAIR_IN_MAKE_TEST = {(Fault.RESET, handing_over)}


def cuts(phases: Sequence[Phase], in_make_test: Collection[tuple[Fault, Phase]]) -> list[Any]:
    """Returns every fault of a connection in every phase."""
    every = [(fault, phase) for fault in Fault for phase in phases]
    return [pytest.param(*cut, marks=() if cut in in_make_test else LONG) for cut in every]


@pytest.mark.parametrize(("fault", "phase"), cuts(PHASES, IN_MAKE_TEST))
async def test_cut_off_from_the_router(
    cluster: RealCluster, reference: GreedyReference, fault: Fault, phase: Phase
) -> None:
    async def attempt() -> bool:
        async with load(cluster, reference, num_jobs=NUM_JOBS[phase is queued]) as running:
            victim = await reach(cluster, phase, running)
            with cluster.cut(fault, victim, ["router-0"]):
                await reaches(cluster, victim, control_pb2.WORKER_STATE_DOWN, LOST_WITHIN_S)
                await running.any_done()
        return running.num_retries > 0

    await strike(attempt)


@pytest.mark.parametrize(("fault", "phase"), cuts((prefilling, handing_over, taking_over), PAIR_IN_MAKE_TEST))
async def test_cut_off_from_each_other(
    cluster: RealCluster, reference: GreedyReference, fault: Fault, phase: Phase
) -> None:
    async def attempt() -> bool:
        async with load(cluster, reference) as running:
            victim = await reach(cluster, phase, running)
            sources = ["prefill-0", "prefill-1"] if victim in DECODERS else [victim]
            with contextlib.ExitStack() as stack:
                for source in sources:
                    stack.enter_context(cluster.cut(fault, source, DECODERS))
                await running.all_done(CUT_PAIR_WITHIN_S)
        return running.num_retries > 0

    await strike(attempt)


@pytest.mark.parametrize(
    "fault", [Fault.DROP, *(pytest.param(fault, marks=LONG) for fault in (Fault.STALL, Fault.RESET))]
)
async def test_a_cut_after_the_handoff_is_nobodys_business(
    cluster: RealCluster, reference: GreedyReference, fault: Fault
) -> None:
    """Sequences that have their KV need no source any more: none is placed again."""
    [job] = mixed_jobs(random.Random(5), 1, range(100, 101), range(200, 201))
    async with streams(cluster.router, reference, [job]) as running:
        await cluster.router.until(has_been_handed_over, "the sequence decodes, and nobody holds a lease")
        with contextlib.ExitStack() as stack:
            for source in ("prefill-0", "prefill-1"):
                stack.enter_context(cluster.cut(fault, source, DECODERS))
            await running.all_done(CUT_PAIR_WITHIN_S)
    assert running.num_retries == 0


def has_been_handed_over(status: Status) -> bool:
    loads = [each.load for each in status.workers]
    return decoding(status) is not None and not any(load.num_leases or load.num_importing for load in loads)
