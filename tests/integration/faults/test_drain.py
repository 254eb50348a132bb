"""Workers that leave in order: no request is dropped."""

from __future__ import annotations

import asyncio
import re

import pytest

from baton.v1 import control_pb2
from tests.equality import GreedyReference
from tests.phases import decoding, prefilling, reach, reaches
from tests.processes import baton
from tests.real_cluster import RealCluster
from tests.streams import keep_asking, load

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]


@pytest.mark.parametrize(("deadline", "moves"), [("60", False), ("0", True)], ids=["finished", "moved"])
async def test_baton_drain(cluster: RealCluster, reference: GreedyReference, deadline: str, moves: bool) -> None:
    async with load(cluster, reference) as running:
        worker_id = await reach(cluster, decoding)
        flags = ["--target", f"127.0.0.1:{cluster['router-0'].port}", "--deadline", deadline]
        drained = await asyncio.to_thread(baton, ["drain", worker_id, *flags], cluster.temp)
        assert drained.returncode == 0, drained.stderr
        words = re.search(r"(\d+) requests finished there, (\d+) moved", drained.stdout)
        assert words is not None
        assert bool(int(words[2])) == moves
        await reaches(cluster, worker_id, control_pb2.WORKER_STATE_DRAINING, 1.0)
    assert bool(running.num_retries) == moves
    await cluster[worker_id].terminate()  # the next to come under its name is no longer drained


@pytest.mark.parametrize("phase", [prefilling, decoding])
async def test_sigterm(cluster: RealCluster, reference: GreedyReference, phase: object) -> None:
    async with load(cluster, reference) as running:
        await cluster[await reach(cluster, phase)].terminate()
    assert not running.num_retries, "what it had begun it finished"


async def test_rolling_restart_under_load(cluster: RealCluster, reference: GreedyReference) -> None:
    over = asyncio.Event()
    asking = asyncio.create_task(keep_asking(cluster.router, reference, over, num_clients=2))
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        cluster.watch()
        await cluster[name].terminate()
        await cluster.whole()
    over.set()
    assert await asking > 4
