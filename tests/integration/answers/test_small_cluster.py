"""Tests the router with real workers in this process, on a tiny model: splits, small pools, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import types_pb2
from services.kvtransfer.transports.nixl_agent import is_installed
from tests.support.cluster import greedy_request, running_cluster
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.workers import DECODE, MIXED, PREFILL, Roles


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


def prompt_of(number: int, length: int) -> list[int]:
    return [3 + (number * 31 + position * 7) % (VOCAB_SIZE - 3) for position in range(length)]


CARRIED_BY = {
    "split": types_pb2.TRANSPORT_SHM,
    "tcp": types_pb2.TRANSPORT_TCP,
    "nixl": types_pb2.TRANSPORT_NIXL,
}


async def test_all_ways_to_run_a_request_give_the_same_tokens(model: Path) -> None:
    """Those that `test_split_equality.py` leaves out."""
    prompts = [prompt_of(number, length) for number, length in enumerate((1, 15, 16, 17, 100, 300))]
    clusters: dict[str, tuple[list[Roles], dict[str, str]]] = {
        "split": ([PREFILL, DECODE], {}),
        "tcp": ([PREFILL, DECODE], {"transport": "tcp"}),
        **({"nixl": ([PREFILL, DECODE], {"transport": "nixl"})} if is_installed() else {}),
        "whole": ([DECODE], {}),
    }
    outputs = {}
    for name, (roles, transport) in clusters.items():
        async with running_cluster(model, roles, **transport) as cluster:
            answers = [await cluster.greedy(prompt, 12) for prompt in prompts]
            outputs[name] = [answer.token_ids for answer in answers]
            completion = answers[-1].completion
            assert completion is not None
            if name in CARRIED_BY:
                assert completion.timings.transport == CARRIED_BY[name]
                assert completion.timings.transfer_blocks == 19
    assert all(len(output) == 12 for output in outputs["split"])
    assert all(output == outputs["split"] for output in outputs.values())


@pytest.mark.parametrize(
    ("roles", "kv_blocks"),
    [
        ([PREFILL, DECODE], [12, 64]),
        ([PREFILL, DECODE], [64, 14]),
        ([PREFILL, DECODE, DECODE], [12, 14, 14]),
        ([MIXED], [16]),
        ([PREFILL, MIXED, DECODE], [12, 16, 14]),
    ],
    ids=["small prefill", "small decode", "both small", "mixed", "all roles"],
)
async def test_many_streams_on_pools_too_small_for_them(model: Path, roles: list[Roles], kv_blocks: list[int]) -> None:
    """All finish, none starves, and nobody reads another's blocks: alone, a request has the same answer."""
    chance, num_streams = random.Random(1), 100
    async with running_cluster(model, roles, each=[{"kv_blocks": number} for number in kv_blocks]) as cluster:
        requests = [
            greedy_request(
                prompt_of(number, chance.choice((1, 15, 16, 17, 60, 150))),
                chance.choice((1, 2, 17, 20)),
                priority=number % 3,
            )
            for number in range(num_streams)
        ]
        answers = await asyncio.gather(*(cluster.stream(request) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            assert len(answer.token_ids) == request.stopping.max_tokens
            assert answer.completion is not None
            assert answer.completion.usage.prompt_tokens == len(request.token_ids.ids)
        for number in chance.sample(range(num_streams), 5):
            alone = await cluster.stream(requests[number])
            assert alone.token_ids[:8] == answers[number].token_ids[:8]


async def test_a_storm_of_cancellations_leaves_nothing(model: Path) -> None:
    async with running_cluster(model, [PREFILL, DECODE], kv_blocks=32) as cluster:

        async def impatient(number: int) -> None:
            call = cluster.inference.GenerateStream(greedy_request(prompt_of(number, 20 + number * 13 % 200), 100))
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                async for count, _ in _counted(call):
                    if count >= number % 5:
                        call.cancel()

        await asyncio.gather(*(impatient(number) for number in range(60)))
        assert len((await cluster.greedy(prompt_of(1, 50), 5)).token_ids) == 5


async def _counted(call: Any) -> AsyncIterator[tuple[int, Any]]:
    count = 0
    async for event in call:
        yield count, event
        count += 1
