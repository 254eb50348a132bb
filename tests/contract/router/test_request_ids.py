"""Tests that a request's id, however its client gives it, only labels the request: many may have the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baton.v1 import control_pb2, inference_pb2
from services.router.front.http.reply import REQUEST_ID
from tests.support.cluster import CONFIG, Cluster, read, request
from tests.support.http_client import bare_client
from tests.support.scripted_worker import TEXT

COMPLETIONS = "/v1/completions"
Phase = control_pb2.RequestPhase


@pytest.fixture
async def cluster(model: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(replace(CONFIG, model=model, http_port=0))
    await cluster.start()
    yield cluster
    await cluster.idle()
    await cluster.stop()


async def two_live(cluster: Cluster, pair: Any) -> list[Any]:
    """Returns two streams of one id whose prompts are at the worker."""
    pair[0].prefill_gate.clear()
    calls = [cluster.inference.GenerateStream(request(request_id="r")) for _ in range(2)]
    await pair[0].until(lambda: len(pair[0].commands) == 2)
    return calls


async def phases(cluster: Cluster) -> list[int]:
    answer = await cluster.control.ListTimelines(control_pb2.ListTimelinesRequest())
    assert {each.request_id for each in answer.timelines} == {"r"}
    return sorted(each.phase for each in answer.timelines)


async def test_two_calls_of_one_id_both_run(cluster: Cluster, pair: Any) -> None:
    calls = await two_live(cluster, pair)
    pair[0].prefill_gate.set()
    for events, text in await asyncio.gather(*map(read, calls)):
        assert (events[0].prompt_info.request_id, text) == ("r", TEXT)
    assert [command.request_id for command in pair[0].commands] == ["r", "r"]


async def test_the_end_of_one_is_not_the_end_of_the_other(cluster: Cluster, pair: Any) -> None:
    first, second = await two_live(cluster, pair)
    first.cancel()

    async def is_over() -> bool:
        return await phases(cluster) == [Phase.REQUEST_PHASE_PREFILLING, Phase.REQUEST_PHASE_ENDED]

    await cluster.until(is_over)
    pair[0].prefill_gate.set()
    assert (await read(second))[1] == TEXT


async def test_an_operator_finds_all_of_one_id(cluster: Cluster, pair: Any) -> None:
    first, second = await two_live(cluster, pair)
    found = (await cluster.control.Explain(control_pb2.ExplainRequest(request_id="r"))).requests
    assert [(each.request_id, each.live) for each in found] == [("r", True), ("r", True)]
    legs = [each.choices[0].leg for each in found]
    assert legs == sorted(legs, reverse=True), "the newest is first"
    pair[0].prefill_gate.set()
    await asyncio.gather(read(first), read(second))


async def test_two_calls_of_one_header_both_run(cluster: Cluster, pair: Any) -> None:
    pair[0].prefill_gate.clear()
    async with bare_client(cluster) as http:
        body, headers = {"prompt": "hello", "max_tokens": 64}, {REQUEST_ID: "r"}
        answers = [asyncio.create_task(http.post(COMPLETIONS, json=body, headers=headers)) for _ in range(2)]
        await pair[0].until(lambda: len(pair[0].commands) == 2)
        pair[0].prefill_gate.set()
        for answer in await asyncio.gather(*answers):
            assert (answer.status_code, answer.headers[REQUEST_ID]) == (200, "r")
            assert answer.json()["choices"][0]["text"] == TEXT


async def test_a_client_that_gives_none_is_told_the_one_that_was_drawn(cluster: Cluster, pair: Any) -> None:
    answers: list[inference_pb2.GenerateResponse] = [await cluster.inference.Generate(request()) for _ in range(2)]
    drawn = [answer.prompt_info.request_id for answer in answers]
    assert len(set(drawn)) == 2
    for each in drawn:
        assert len((await cluster.control.Explain(control_pb2.ExplainRequest(request_id=each))).requests) == 1
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await cluster.control.Explain(control_pb2.ExplainRequest(request_id="1"))  # the router's own
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
