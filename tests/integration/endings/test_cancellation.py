"""Tests a client's cancel in each phase: every block on both workers comes back, and no work is orphaned."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.router.coordinator.request import Phase
from tests.support.cluster import Cluster, greedy_request, running_cluster
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.patience import HANG_S
from tests.support.workers import DECODE, MIXED, PREFILL, until

LONG = random.Random(0).choices(range(3, VOCAB_SIZE), k=700)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("cancel"))


READERS: set[asyncio.Task[grpc.StatusCode]] = set()
"""Keeps the streams' readers alive; they end with their streams."""


def in_phase(phase: Phase) -> Callable[[Cluster], bool]:
    return lambda cluster: cluster.router.coordinator.phases()[phase] > 0


PHASES: dict[str, Callable[[Cluster], bool]] = {
    "queued": in_phase(Phase.QUEUED),
    "prefilling": in_phase(Phase.PREFILLING),
    "computing the prompt": lambda cluster: len(cluster.workers[0].leases) > 0,
    "importing": lambda cluster: len(cluster.workers[1].imports) > 0,
    "parked": in_phase(Phase.PARKED),
    "decoding": lambda cluster: cluster.workers[1].engine.stats().num_running > 0,
}


async def start_in_phase(cluster: Cluster, phase: str) -> list[Any]:
    """Returns streams of which at least one is in the phase. The router has all of them."""
    # "queued" and "parked" need others that hold the room; the decode pool holds two of these prompts.
    count = 6 if phase in ("queued", "parked") else 1
    requests = [greedy_request(LONG[n:], 200) for n in range(count)]
    calls = [cluster.inference.GenerateStream(request) for request in requests]
    READERS.update(asyncio.create_task(drain(call)) for call in calls)

    def reached() -> bool:
        # One that the router has yet to read could come after the cluster was found idle, and before its cancel.
        return cluster.router.coordinator.num_live == count and PHASES[phase](cluster)

    await until(reached, f"a request is {phase}", 30.0, pause_s=0)
    return calls


async def drain(call: Any) -> grpc.StatusCode:
    """Reads a stream to its end, whatever that is."""
    try:
        async for _ in call:
            pass
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    code: grpc.StatusCode = await call.code()
    return code


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("phase", PHASES)
async def test_client_cancel(model: Path, phase: str, transport: str) -> None:
    each = [{"kv_blocks": 160}, {"kv_blocks": 120}]
    async with running_cluster(
        model, [PREFILL, DECODE], each=each, transport=transport, max_num_batched_tokens=16
    ) as cluster:
        calls = await start_in_phase(cluster, phase)
        for call in calls:
            call.cancel()
        await cluster.idle()
        steps = await cluster.steps_at_rest()
        assert len((await cluster.greedy(LONG[:40], 3, cache_salt="after")).token_ids) == 3
        # 3 chunks and 2 decodes, and no step of anyone who had left.
        assert [worker.engine.stats().num_steps for worker in cluster.workers] == [steps[0] + 3, steps[1] + 2]


async def test_a_mixed_worker(model: Path) -> None:
    async with running_cluster(model, [MIXED], max_num_batched_tokens=16) as cluster:
        for tokens in (0, 1, 2, 5):
            call = cluster.inference.GenerateStream(greedy_request(LONG, 200))
            received = 0
            async with asyncio.timeout(HANG_S):
                while received < tokens:
                    received += len((await call.read()).chunk.token_ids)
            call.cancel()
            await cluster.idle()


async def test_a_stop_string_ends_the_work_too(model: Path) -> None:
    async with running_cluster(model, [PREFILL, DECODE]) as cluster:
        text = (await cluster.greedy(LONG[:50], 60)).text
        request = greedy_request(LONG[:50], 300)
        request.stopping.stop.append(text[10:14])
        await cluster.stream(request)
        await cluster.idle()
