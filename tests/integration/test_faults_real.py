"""Real processes that are killed, stopped and cut off in every phase, while clients stream: no token is lost, repeated
or changed, and nothing is left held."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from baton.v1 import control_pb2
from tests.equality import GreedyReference
from tests.models import tiny_model
from tests.proxy import Fault
from tests.real_cluster import RealCluster, Status, real_cluster
from tests.streams import Streams, mixed_jobs, streams

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
# Small chunks make prompts take many steps, small pools make requests wait.
FLAGS = (
    "--dtype",
    "float32",
    "--threads",
    "1",
    "--kv-blocks",
    "72",
    "--max-num-batched-tokens",
    "32",
    "--stall-s",
    "1",
)
RANDOM = random.Random(1)
LOST_WITHIN_S = 4.0
"""Routers wait for 2 s of silence."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of many thin layers: quick to load, slow enough to be caught in each phase."""
    return tiny_model("llama", tmp_path_factory.mktemp("models"), num_hidden_layers=12)


@pytest.fixture(scope="module")
def reference(model: Path) -> GreedyReference:
    return GreedyReference(model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    async with real_cluster(model, tmp_path_factory.mktemp("temp"), WORKERS, *FLAGS, num_routers=2) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: RealCluster) -> AsyncIterator[RealCluster]:
    """Whole and idle before each test, idle within 5 s after it."""
    await shared.whole()
    await shared.idle()
    shared.watch()
    yield shared
    await shared.idle()
    await shared.whole()
    await shared.idle()


@contextlib.asynccontextmanager
async def load(cluster: RealCluster, reference: GreedyReference) -> AsyncIterator[Streams]:
    jobs = mixed_jobs(RANDOM, 10, range(150, 550), range(50, 100))
    async with streams(cluster.router, reference, jobs) as running:
        yield running


# Phases: each finds the worker to be hit in a router's status, if there is one now.

Phase = Callable[[Status], str | None]


def queued(status: Status) -> str | None:
    """Some wait; a prefill worker that runs others."""
    return _busy(status, "prefill", "num_running") if status.num_queued else None


def prefilling(status: Status) -> str | None:
    return _busy(status, "prefill", "num_running") if status.num_prefilling else None


def handing_over(status: Status) -> str | None:
    """The source of a transfer."""
    return _busy(status, "prefill", "num_leases") if taking_over(status) else None


def taking_over(status: Status) -> str | None:
    """The destination of a transfer."""
    return _busy(status, "decode", "num_importing")


def decoding(status: Status) -> str | None:
    return _busy(status, "decode", "num_running")


def _busy(status: Status, role: str, count: str) -> str | None:
    names = (each.worker.worker_id for each in status.workers if getattr(each.load, count))
    return next((name for name in names if name.startswith(role)), None)


async def reach(cluster: RealCluster, phase: Phase) -> str:
    """Waits for the phase; the worker to be hit."""
    victim = phase(await cluster.router.until(lambda status: phase(status) is not None, phase.__name__))
    assert victim is not None
    return victim


async def lost(cluster: RealCluster, worker_id: str) -> None:
    """Returns when the router has given the worker up."""

    def suspect(status: Status) -> bool:
        states = {each.worker.worker_id: each.state for each in status.workers}
        return states[worker_id] == control_pb2.WORKER_STATE_SUSPECT

    await cluster.router.until(suspect, f"{worker_id} is lost", LOST_WITHIN_S)


@pytest.mark.parametrize("phase", [queued, prefilling, handing_over, taking_over, decoding])
async def test_killed(cluster: RealCluster, reference: GreedyReference, phase: Phase) -> None:
    async with load(cluster, reference) as running:
        await cluster.restart(await reach(cluster, phase))
    assert running.num_retries


@pytest.mark.parametrize("phase", [queued, prefilling, handing_over, taking_over, decoding])
async def test_stopped_and_continued(cluster: RealCluster, reference: GreedyReference, phase: Phase) -> None:
    async with load(cluster, reference) as running:
        victim = await reach(cluster, phase)
        with cluster[victim].stopped():
            await lost(cluster, victim)
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
            await lost(cluster, victim)
            await running.any_done()
    assert running.num_retries


@pytest.mark.parametrize("fault", list(Fault))
async def test_cut_off_from_each_other(cluster: RealCluster, reference: GreedyReference, fault: Fault) -> None:
    async with load(cluster, reference) as running:
        source = await reach(cluster, handing_over)
        with cluster.cut(fault, source, ["decode-0", "decode-1"]):
            await running.all_done()
    assert running.num_retries
