"""Tests a cluster that is stopped as a whole, as by `docker pause` or with its machine, and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest

from baton.v1 import control_pb2
from services.router.config import RouterConfig
from services.worker.config import WorkerConfig
from tests.support.equality import GreedyReference
from tests.support.models import tiny_model
from tests.support.phases import decoding, reach, reaches
from tests.support.real_cluster import RealCluster, real_cluster
from tests.support.streams import mixed_jobs, streams

pytestmark = [pytest.mark.process, pytest.mark.long]

SILENCE_S = RouterConfig.silence_s
PAUSE_S = 2 * max(SILENCE_S, WorkerConfig.silence_s) - 0.5
"""Just under twice the longer of the two limits on silence."""
ALONE_S = 0.3
"""How much earlier one process is stopped."""
WORKERS = ("prefill-0", "decode-0", "decode-1")
FLAGS = (
    *("--dtype", "float32", "--threads", "1", "--kv-blocks", "128"),
    *("--max-num-batched-tokens", "32"),
)
ROUTER = ("--no-worker-timeout-s", "240", "--queue-timeout-s", "600")


async def pause(cluster: RealCluster, first: str) -> None:
    """Stops all processes. What the others have just sent to the first is not answered before they stop too."""
    with contextlib.ExitStack() as stack:
        for name in sorted(cluster.services, key=lambda name: name != first):
            stack.enter_context(cluster[name].stopped())
            if name == first:
                await asyncio.sleep(ALONE_S)
        await asyncio.sleep(PAUSE_S)  # what is tested: how long they were stopped


@pytest.mark.timeout(300)
async def test_the_whole_cluster_is_paused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    """Streams go on exactly, none is placed again, and no session is lost, whichever process is stopped first. One that
    is stopped alone is noticed as ever."""
    model = tiny_model("llama", tmp_path_factory.mktemp("models"), num_hidden_layers=12)
    reference = GreedyReference(model)
    async with real_cluster(model, tmp_path, WORKERS, *FLAGS, routers=(ROUTER,)) as cluster:
        capfd.readouterr()
        for first in cluster.services:
            jobs = mixed_jobs(random.Random(1), 6, range(100, 300), range(60, 100))
            async with streams(cluster.router, reference, jobs) as running:
                await reach(cluster, decoding, running)
                await pause(cluster, first)
            assert running.num_retries == 0
        said = capfd.readouterr().err
        # (A registration that was under way may say that it had no answer in time; it is asked again.)
        assert "services.router.workers.sessions" not in said, said
        assert "router silent" not in said, said
        with cluster["decode-1"].stopped():
            await reaches(cluster, "decode-1", control_pb2.WORKER_STATE_DOWN, 2 * SILENCE_S)
        await cluster.whole()
