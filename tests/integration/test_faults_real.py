"""Real processes that are killed, stopped and cut off in every phase, while clients stream: no token is lost, repeated
or changed, and nothing is left held."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

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
SILENCE_S = 2.0
"""After which a router gives a worker up."""


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


# Phases, as a router's status shows them.


def _load(status: Status, worker_id: str) -> Any:
    return next(each.load for each in status.workers if each.worker.worker_id == worker_id)


def queued(status: Status) -> bool:
    return status.num_queued > 0 and _load(status, "prefill-0").num_running > 0


def prefilling(status: Status) -> bool:
    return status.num_prefilling > 0 and _load(status, "prefill-0").num_running > 0


def transferring(status: Status) -> bool:
    return _load(status, "decode-0").num_importing > 0 and _load(status, "prefill-0").num_running > 0


def decoding(status: Status) -> bool:
    return _load(status, "decode-0").num_running > 0


PHASES = [
    pytest.param(queued, "prefill-0", id="queued-prefill"),
    pytest.param(prefilling, "prefill-0", id="prefilling-prefill"),
    pytest.param(transferring, "prefill-0", id="transferring-prefill"),
    pytest.param(transferring, "decode-0", id="transferring-decode"),
    pytest.param(decoding, "decode-0", id="decoding-decode"),
]


@pytest.mark.parametrize(("phase", "victim"), PHASES)
async def test_killed(
    cluster: RealCluster, reference: GreedyReference, phase: Callable[[Status], bool], victim: str
) -> None:
    async with load(cluster, reference) as running:
        await cluster.router.until(phase, phase.__name__)
        await cluster.restart(victim)
    assert running.num_retries


@pytest.mark.parametrize(("phase", "victim"), PHASES)
async def test_stopped_and_continued(
    cluster: RealCluster, reference: GreedyReference, phase: Callable[[Status], bool], victim: str
) -> None:
    async with load(cluster, reference) as running:
        await cluster.router.until(phase, phase.__name__)
        with cluster[victim].stopped():
            await cluster.router.until(_lost(victim), f"{victim} is lost", 2 * SILENCE_S)
            # What it still held at the stop comes late: first the others take over.
            await cluster.router.until(lambda status: not status.num_prefilling, "the others have taken over", 30)
    assert running.num_retries


def _lost(worker_id: str) -> Callable[[Status], bool]:
    def lost(status: Status) -> bool:
        states = {each.worker.worker_id: each.state for each in status.workers}
        return states[worker_id] == control_pb2.WORKER_STATE_SUSPECT

    return lost


CUTS = [
    pytest.param(Fault.STALL, prefilling, "prefill-0", id="stall-prefilling"),
    pytest.param(Fault.DROP, transferring, "decode-0", id="drop-transferring"),
    pytest.param(Fault.DROP, decoding, "decode-0", id="drop-decoding"),
    pytest.param(Fault.RESET, prefilling, "prefill-0", id="reset-prefilling"),
    pytest.param(Fault.RESET, decoding, "decode-0", id="reset-decoding"),
]


@pytest.mark.parametrize(("fault", "phase", "victim"), CUTS)
async def test_cut_off_from_the_router(
    cluster: RealCluster, reference: GreedyReference, fault: Fault, phase: Callable[[Status], bool], victim: str
) -> None:
    async with load(cluster, reference) as running:
        await cluster.router.until(phase, phase.__name__)
        with cluster.cut(fault, victim, ["router-0"]):
            await cluster.router.until(_lost(victim), f"{victim} is lost", 2 * SILENCE_S)
    assert running.num_retries


@pytest.mark.parametrize("fault", list(Fault))
async def test_cut_off_from_each_other(cluster: RealCluster, reference: GreedyReference, fault: Fault) -> None:
    async with load(cluster, reference) as running:
        await cluster.router.until(transferring, "transferring")
        with cluster.cut(fault, "prefill-0", ["decode-0", "decode-1"]):
            await cluster.router.until(lambda status: not status.num_queued, "all have started", 60)
    assert running.num_retries
