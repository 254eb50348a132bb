"""Tests two real processes with one `--worker-id`: the second is refused by name while the first lives, then takes
over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import control_pb2
from tests.support.cluster import greedy_request
from tests.support.models import tiny_model
from tests.support.patience import Patience
from tests.support.real_cluster import READY_WITHIN_S, RealCluster, real_cluster
from tests.support.trusted import dial

pytestmark = pytest.mark.process

FLAGS = ("--dtype", "float32", "--threads", "1", "--kv-blocks", "64")
NAME = "decode-0"
PROMPT = list(range(5, 45))
TAKES_OVER_WITHIN_S = 10.0
"""A death is noticed when the connection ends; the longest pause between two attempts is 2.5 s."""


async def tokens(cluster: RealCluster, num: int = 40) -> list[int]:
    answer = await cluster.router.stream(greedy_request(PROMPT, num))
    assert answer.completion is not None
    assert answer.completion.workers.retries == 0
    return answer.token_ids


async def process(cluster: RealCluster) -> int:
    """Returns the id of the process that has the name at the router and is ready there; 0 if none is."""
    for each in (await cluster.router.status()).workers:
        if each.worker.worker_id == NAME and each.state == control_pb2.WORKER_STATE_READY:
            return int(each.worker.pid)
    return 0


async def is_serving(port: int) -> bool:
    async with dial(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service="baton.v1.WorkerService")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=30.0)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def until(condition: Callable[[], Any], what: str, within_s: float) -> None:
    patience = Patience(within_s)
    while not await condition():
        assert not patience.is_over(), f"not within {within_s} s: {what}"
        await asyncio.sleep(0.02)


@pytest.mark.timeout(300)
async def test_the_second_waits_visibly_and_takes_over(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    said = ""

    async def was_refused() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "refuses this worker" in said

    model = tiny_model("llama", tmp_path_factory.mktemp("model"))
    async with real_cluster(model, tmp_path, ("prefill-0", NAME), *FLAGS) as cluster:
        first, known = cluster[NAME], await tokens(cluster)
        under_way = asyncio.create_task(tokens(cluster, 120))
        await cluster.add_worker("decode-second", "--worker-id", NAME)
        second = cluster["decode-second"]
        await until(was_refused, "the second is refused", READY_WITHIN_S)
        assert f"ALREADY_EXISTS another process is worker '{NAME}', and it lives" in said
        assert (await under_way)[: len(known)] == known
        assert await tokens(cluster) == known
        assert await process(cluster) == first.pid
        assert await is_serving(first.port)
        assert not await is_serving(second.port)
        await until(was_refused, "it is said once", 1.0)
        assert said.count("refuses this worker") == 1
        assert second.pid, "it goes on trying"

        await first.kill()

        async def took_over() -> bool:
            return await process(cluster) == second.pid

        await until(took_over, "the second takes over", TAKES_OVER_WITHIN_S)
        await until(lambda: is_serving(second.port), "it says so", TAKES_OVER_WITHIN_S)
        assert await tokens(cluster) == known
        await cluster.router.until(lambda status: status.num_decoding == 0, "it is idle")
