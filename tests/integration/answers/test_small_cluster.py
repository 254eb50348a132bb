"""Tests the router with real workers in this process, on a tiny model: splits, small pools, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from services.kvtransfer.transports.nixl_agent import is_installed
from services.router.main import Router, RouterConfig
from services.rpc.telemetry import Tracer
from services.worker.host import WorkerHost
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.trusted import CLUSTER_TOKEN, dial
from tests.support.workers import DECODE, MIXED, PREFILL, running_worker, until, worker_config

GREEDY = types_pb2.SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


class Cluster:
    def __init__(self, router: Router, stub: inference_pb2_grpc.InferenceServiceStub, hosts: list[WorkerHost]) -> None:
        self.router = router
        self.stub = stub
        self.hosts = hosts

    async def generate(self, prompt: list[int], max_tokens: int, **fields: Any) -> inference_pb2.GenerateResponse:
        return await self.stub.Generate(asked(prompt, max_tokens), **fields)


def asked(prompt: list[int], max_tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=GREEDY,
        stopping=types_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


@contextlib.asynccontextmanager
async def running(model: Path, *workers: tuple[types_pb2.WorkerRole, dict[str, Any]]) -> AsyncIterator[Cluster]:
    """A router and its workers, joined; everything is idle at the end."""
    router = Router(
        RouterConfig(model=str(model), port=0, control_port=0, canaries=False),
        Tracer(TracerProvider(shutdown_on_exit=False)),
        CLUSTER_TOKEN,
    )
    await router.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(router.stop)
        channel = await stack.enter_async_context(dial(router.address))
        hosts = []
        for number, (role, changes) in enumerate(workers):
            config = worker_config(model, router=(router.control_address,), worker_id=f"w{number}", **changes)
            hosts.append(await stack.enter_async_context(running_worker(config, role)))
        ready = lambda: sum(host.num_sessions for host in hosts) >= len(hosts) and router.coordinator.ready  # noqa: E731
        await until(ready, "all workers joined")
        yield Cluster(router, inference_pb2_grpc.InferenceServiceStub(channel), hosts)
        await until(lambda: router.coordinator.num_live == 0, "no request lives")
        router.coordinator.check_idle()


def prompt_of(number: int, length: int) -> list[int]:
    return [3 + (number * 31 + position * 7) % (VOCAB_SIZE - 3) for position in range(length)]


CARRIED_BY = {
    "split": types_pb2.TRANSPORT_SHM,
    "tcp": types_pb2.TRANSPORT_TCP,
    "nixl": types_pb2.TRANSPORT_NIXL,
    "grpc": types_pb2.TRANSPORT_GRPC,
}


async def test_all_ways_to_run_a_request_give_the_same_tokens(model: Path) -> None:
    prompts = [prompt_of(number, length) for number, length in enumerate((1, 15, 16, 17, 100, 300))]
    clusters = {
        "split": [(PREFILL, {}), (DECODE, {})],
        "tcp": [(PREFILL, {"transport": "tcp"}), (DECODE, {"transport": "tcp"})],
        **({"nixl": [(PREFILL, {"transport": "nixl"}), (DECODE, {"transport": "nixl"})]} if is_installed() else {}),
        "grpc": [(PREFILL, {"transport": "grpc"}), (DECODE, {"transport": "grpc"})],
        "mixed": [(MIXED, {})],
        "whole": [(DECODE, {})],
    }
    outputs = {}
    for name, workers in clusters.items():
        async with running(model, *workers) as cluster:
            answers = [await cluster.generate(prompt, 12) for prompt in prompts]
            outputs[name] = [list(answer.output.token_ids) for answer in answers]
            timings = answers[-1].completion.timings
            if name in CARRIED_BY:
                assert timings.transport == CARRIED_BY[name]
                assert timings.transfer_blocks == 19
    assert all(len(output) == 12 for output in outputs["split"])
    assert all(output == outputs["split"] for output in outputs.values())


@pytest.mark.parametrize(
    "workers",
    [
        [(PREFILL, {"kv_blocks": 12}), (DECODE, {"kv_blocks": 64})],
        [(PREFILL, {"kv_blocks": 64}), (DECODE, {"kv_blocks": 14})],
        [(PREFILL, {"kv_blocks": 12}), (DECODE, {"kv_blocks": 14}), (DECODE, {"kv_blocks": 14})],
        [(MIXED, {"kv_blocks": 16})],
        [(PREFILL, {"kv_blocks": 12}), (MIXED, {"kv_blocks": 16}), (DECODE, {"kv_blocks": 14})],
    ],
    ids=["small prefill", "small decode", "both small", "mixed", "all roles"],
)
async def test_many_streams_on_pools_too_small_for_them(model: Path, workers: Any) -> None:
    async with running(model, *workers) as cluster:
        lengths = [1 + number * 37 % 150 for number in range(60)]
        answers = await asyncio.gather(
            *(cluster.generate(prompt_of(number, length), 1 + number % 20) for number, length in enumerate(lengths))
        )
        for number, answer in enumerate(answers):
            assert len(answer.output.token_ids) == 1 + number % 20
        repeated = await cluster.generate(prompt_of(7, lengths[7]), 8)
        assert list(repeated.output.token_ids) == list(answers[7].output.token_ids)


async def test_a_storm_of_cancellations_leaves_nothing(model: Path) -> None:
    async with running(model, (PREFILL, {"kv_blocks": 32}), (DECODE, {"kv_blocks": 32})) as cluster:

        async def impatient(number: int) -> None:
            call = cluster.stub.GenerateStream(asked(prompt_of(number, 20 + number * 13 % 200), 100))
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                async for count, _ in _counted(call):
                    if count >= number % 5:
                        call.cancel()

        await asyncio.gather(*(impatient(number) for number in range(60)))
        assert len((await cluster.generate(prompt_of(1, 50), 5)).output.token_ids) == 5


async def _counted(call: Any) -> AsyncIterator[tuple[int, Any]]:
    count = 0
    async for event in call:
        yield count, event
        count += 1
