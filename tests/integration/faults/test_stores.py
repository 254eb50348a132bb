"""Tests a store among real processes: what waits there outlives its prefill worker, and no client notices the store's
own end."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import pytest_asyncio

from baton.v1 import control_pb2
from tests.integration.faults.conftest import ALL, FLAGS, ROUTERS
from tests.support.equality import GreedyReference
from tests.support.models import tiny_model
from tests.support.phases import PHASE_WITHIN_S, Phase, parked, parking, reach, strike
from tests.support.real_cluster import READY_WITHIN_S, RealCluster, Status, real_cluster
from tests.support.streams import Missed, Streams, mixed_jobs, streams

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]

RANDOM = random.Random(15)
NUM_JOBS = 6


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    """Has a decode worker with room for one or two of the prompts."""
    flags = {"decode-0": ("--kv-blocks", "24"), "store-0": ("--kvtransfer-bytes", "64MiB", "--drain-s", "240")}
    workers = ("prefill-0", "decode-0", "store-0")
    temp = tmp_path_factory.mktemp("temp")
    async with real_cluster(model, temp, workers, *FLAGS, routers=ROUTERS, flags_of=flags) as cluster:
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


def _prefill_is_free(status: Status) -> bool:
    [prefill] = [each for each in status.workers if each.worker.worker_id == "prefill-0"]
    waits = status.num_queued or status.num_prefilling
    return not waits and not prefill.load.num_leases and not prefill.load.num_running and parked(status) is not None


async def _all_is_parked(cluster: RealCluster, running: Streams) -> None:
    """Waits until the prefill worker has nothing any more, and handoffs wait at the store. Raises Missed."""
    status = await cluster.router.until(
        lambda status: _prefill_is_free(status) or running.are_done, "the prefill worker is free", PHASE_WITHIN_S
    )
    if not _prefill_is_free(status):
        raise Missed("all was over")


async def test_a_prefill_worker_killed_after_its_leases_moved_costs_nothing(
    cluster: RealCluster, reference: GreedyReference
) -> None:
    async def attempt() -> bool:
        async with crowd(cluster, reference) as running:
            await _all_is_parked(cluster, running)
            await cluster["prefill-0"].kill()
        await cluster["prefill-0"].start()
        assert running.num_retries == 0, "nothing is computed again"
        return True

    await strike(attempt)


@pytest.mark.parametrize("phase", [parking, parked])
async def test_a_store_that_is_killed_costs_no_token(
    cluster: RealCluster, reference: GreedyReference, phase: Phase
) -> None:
    await strike(lambda: kill_in(cluster, reference, phase))


async def test_a_source_killed_while_its_handoff_moves_costs_no_token(
    cluster: RealCluster, reference: GreedyReference
) -> None:
    async def attempt() -> bool:
        async with crowd(cluster, reference) as running:
            await reach(cluster, parking, running)
            await cluster.restart("prefill-0")
        return True

    await strike(attempt)


async def test_a_store_that_is_drained_hands_over_what_it_has(cluster: RealCluster, reference: GreedyReference) -> None:
    async def attempt() -> bool:
        async with crowd(cluster, reference) as running:
            await reach(cluster, parked, running)
            await cluster.router.control.Drain(
                control_pb2.DrainRequest(worker_id="store-0", deadline_ms=240_000), timeout=300.0
            )
            await cluster["store-0"].left()
        assert running.num_retries == 0
        await cluster["store-0"].start()
        return True

    await strike(attempt)


async def test_two_routers_share_a_store(cluster: RealCluster, reference: GreedyReference) -> None:
    async def attempt() -> bool:
        async with crowd(cluster, reference) as first, crowd(cluster, reference, router=1) as second:
            await reach(cluster, parked, second, router=1)
        return not first.num_retries and not second.num_retries

    await strike(attempt)


async def test_a_store_empties_itself_for_the_weights_that_replace_the_old_ones(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The model keeps its name and gets other weights, as when a checkpoint is replaced."""
    named, folder = ("--served-model-name", "m"), tmp_path_factory.mktemp("temp")
    other = tiny_model("llama", tmp_path_factory.mktemp("models"), num_hidden_layers=3)
    flags = {"store-0": ("--kvtransfer-bytes", "16MiB", "--relearn-s", "0.5")}
    workers = ("mixed-0", "store-0")
    async with real_cluster(
        model, folder, workers, *FLAGS, *named, routers=((*ALL, *named),), flags_of=flags
    ) as cluster:

        def kv(status: Status) -> dict[str, str]:
            ready = (each.worker for each in status.workers if each.state == control_pb2.WORKER_STATE_READY)
            return {worker.worker_id: worker.fingerprint.kv for worker in ready}

        before = kv(await cluster.router.status())
        assert before["store-0"] == before["mixed-0"]
        cluster._model = other
        await cluster.add_worker("mixed-1")
        both = kv(await cluster.router.until(lambda status: "mixed-1" in kv(status), "it is ready", READY_WITHIN_S))
        assert both["store-0"] == both["mixed-0"] != both["mixed-1"], (
            "while one is left, it keeps what that one computes"
        )
        await cluster["mixed-0"].kill()
        await cluster.router.until(
            lambda status: kv(status).get("store-0") == both["mixed-1"], "the store keeps the others'", READY_WITHIN_S
        )
