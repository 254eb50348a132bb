"""Tests that workers that compute differently under one model name never share a stream, whichever way they differ.

The case of the issue: YaRN is switched on in config.json during a rolling restart, the weights stay as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider

from services.cli.status import text
from services.engine.schedule.sequence import StepPlan
from services.rpc.plain import plain
from services.rpc.telemetry import Tracer
from services.worker.host import WorkerHost
from tests.support.cluster import Cluster, greedy_request, receive, running_cluster
from tests.support.held_runner import HeldRunner
from tests.support.models import tiny_model
from tests.support.workers import DECODE, PREFILL, Roles, running_worker, until, worker_config

PROMPT = [3 + (position * 7) % 300 for position in range(60)]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
NO_WORKER_S = 1.0


@pytest.fixture(scope="module")
def plain_rope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model with the same weights, byte for byte, and the same model name."""
    directory = tiny_model("llama", tmp_path_factory.mktemp("yarn"))
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": YARN}))
    return directory


async def alone(model: Path, max_tokens: int) -> list[int]:
    async with running_cluster(model, [DECODE]) as cluster:
        return (await cluster.greedy(PROMPT, max_tokens)).token_ids


async def test_workers_of_other_rope_parameters_do_not_pair_and_are_named(
    plain_rope: Path, yarn: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "services.router")
    expected = await alone(yarn, 12)
    assert expected != await alone(plain_rope, 12), "the models must differ for the test to say anything"
    async with running_cluster(plain_rope, [PREFILL, DECODE], each=[{}, {"model": str(yarn)}]) as cluster:
        answer = await cluster.greedy(PROMPT, 12)
        status = await cluster.status()
        assert not status.pairs, "they must not pair"
        assert answer.token_ids == expected, "the only decode worker's own answer"
        prints = {each.worker.worker_id: each.worker.fingerprint for each in status.workers}
        assert prints["w0"].kv != prints["w1"].kv
        assert prints["w0"].numerics == prints["w1"].numerics
        groups = {tuple(group.worker_ids): group.kv for group in status.models[0].kv_groups}
        assert groups == {("w0",): prints["w0"].kv, ("w1",): prints["w1"].kv}
        shown = text("there", plain(status))
        for worker in (each.worker for each in status.workers):  # a timing decides, so the two may differ
            assert re.search(r"\w+ attention; .*linear layers: \d+ by ", worker.kernels)
            how = f": torch; {worker.fingerprint.numerics}; float32 KV; {worker.kernels}"
            assert [line for line in shown.splitlines() if line.endswith(how) and worker.worker_id in line]
        await asyncio.sleep(0.5)  # several ticks: it is said once
    said = [record.getMessage() for record in caplog.records if "do not pair" in record.getMessage()]
    told = [message for message in said if "w0" in message and "w1" in message]
    assert len(told) == 1, said
    for worker_id in ("w0", "w1"):
        short = f"{worker_id} (torch {prints[worker_id].kv[:8]})"
        assert short in told[0]
        assert short in shown
    for flag in ("--dtype", "--kv-dtype", "--quantization"):
        assert flag in told[0]
        assert flag in shown


class Farm:
    """Runs workers that can be taken away in the middle of a stream."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._running: dict[str, Any] = {}

    async def add(self, worker_id: str, role: Roles, model: Path) -> WorkerHost:
        router = (self._cluster.router.control_address,)
        config = worker_config(model, router=router, worker_id=worker_id)
        worker = running_worker(config, role, Tracer(TracerProvider(shutdown_on_exit=False)))
        host = await worker.__aenter__()
        self._running[worker_id] = worker
        await until(lambda: self._cluster.num_ready == len(self._running), f"{worker_id} is ready", 20.0)
        return host

    async def take_away(self, *worker_ids: str) -> None:
        """Ends the workers as a deployment does that does not ask: they finish nothing."""
        for worker_id in worker_ids:
            gone = RuntimeError("taken away")
            with contextlib.suppress(RuntimeError):
                await self._running.pop(worker_id).__aexit__(RuntimeError, gone, None)

    async def close(self) -> None:
        await self.take_away(*self._running)


@contextlib.asynccontextmanager
async def farm(model: Path) -> AsyncIterator[tuple[Cluster, Farm]]:
    async with running_cluster(model, [], router={"no_worker_timeout_s": NO_WORKER_S}) as cluster:
        workers = Farm(cluster)
        try:
            yield cluster, workers
        finally:
            await workers.close()


def is_long(plan: StepPlan) -> bool:
    """Returns whether a sequence has some output: until others have joined, it must not come to its end."""
    return any(part.start > len(PROMPT) + 20 for part in plan.sequences)


async def once_begun(stream: AsyncIterator[Any], act: Callable[[], Awaitable[None]]) -> AsyncIterator[Any]:
    """The stream; `act` happens when a few tokens have come."""
    num_tokens, begun = 0, False
    async for message in stream:
        yield message
        num_tokens += len(message.chunk.token_ids)
        if num_tokens >= 3 and not begun:
            begun = True
            await act()


async def test_a_replay_never_goes_to_other_weights_of_the_same_name(plain_rope: Path, yarn: Path) -> None:
    received: list[int] = []

    async def read(stream: AsyncIterator[Any]) -> None:
        async for message in stream:
            received.extend(message.chunk.token_ids)

    async with farm(plain_rope) as (cluster, workers):
        await workers.add("p-old", PREFILL, plain_rope)
        held = HeldRunner(await workers.add("d-old", DECODE, plain_rope), is_long)
        await workers.add("p-new", PREFILL, yarn)

        async def roll_over() -> None:
            await workers.add("d-new", DECODE, yarn)
            held.release()
            await workers.take_away("p-old", "d-old")

        stream = cluster.inference.GenerateStream(greedy_request(PROMPT, 900))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await read(once_begun(stream, roll_over))
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        details = ended.value.details() or ""
        assert "began" in details
        print_of = {each.worker.worker_id: each.worker.fingerprint for each in (await cluster.status()).workers}
        assert print_of["d-old"].kv[:8] in details
        assert print_of["d-new"].kv[:8] in details, "those that are ready, and compute otherwise"
        # It is the stream that is bound, not the cluster.
        assert len((await cluster.greedy(PROMPT, 4)).token_ids) == 4
    assert 3 <= len(received) < 900
    assert received == await alone(plain_rope, len(received)), "what was streamed is one model's"


async def test_a_replay_goes_to_a_worker_of_the_fingerprint_that_began_the_stream(plain_rope: Path, yarn: Path) -> None:
    async with farm(plain_rope) as (cluster, workers):
        held = HeldRunner(await workers.add("d-old", DECODE, plain_rope), is_long)

        async def roll_over() -> None:
            await workers.add("d-new", DECODE, yarn)
            await workers.add("d-twin", DECODE, plain_rope)
            held.release()
            await workers.take_away("d-old")

        stream = cluster.inference.GenerateStream(greedy_request(PROMPT, 900))
        answer = await receive(once_begun(stream, roll_over))
        assert answer.completion is not None
        assert answer.completion.workers.decode == "d-twin"
        assert answer.completion.workers.retries == 1
    assert answer.token_ids == await alone(plain_rope, 900)
