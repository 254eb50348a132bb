"""Tests that a stream which waits says where its request is: comments over HTTP, progress over gRPC for who asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from openai._streaming import SSEDecoder

from baton.v1 import inference_pb2, worker_pb2
from services.core.errors import WorkerFailed
from services.router.front.http.reply import REQUEST_ID
from tests.support.cluster import CONFIG, Cluster, read, request
from tests.support.http_client import bare_client
from tests.support.patience import HANG_S
from tests.support.scripted_worker import TEXT, TOKENIZER

SOON_S = 0.02
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "stream": True, "max_tokens": 64},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "stream": True},
    "/v1/responses": {"input": "hello", "stream": True},
}
PATH = "/v1/completions"
NUM_TOKENS = len(TOKENIZER.encode("hello").ids)
State = inference_pb2.ProgressState


@pytest.fixture
async def cluster(model: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(replace(CONFIG, model=model, http_port=0, http_keepalive_s=SOON_S))
    cluster.router._inference._progress_after_s = SOON_S
    await cluster.start()
    yield cluster
    await cluster.idle()
    await cluster.stop()


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with bare_client(cluster) as http:
        yield http


async def until_line(lines: AsyncIterator[str], wanted: str) -> None:
    async with asyncio.timeout(HANG_S):
        async for line in lines:
            assert not line or line.startswith(":"), "nothing but comments comes first"
            if line == wanted:
                return
    raise AssertionError(f"the stream ended without {wanted!r}")


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_in_the_queue_says_its_place(cluster: Cluster, http: httpx2.AsyncClient, path: str) -> None:
    async with http.stream("POST", path, json=BODIES[path]) as first:
        assert (first.status_code, first.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        await until_line(lines := aiter(first.aiter_lines()), ": waiting, 1st of 1")
        async with http.stream("POST", path, json=BODIES[path]) as second:
            await until_line(more := aiter(second.aiter_lines()), ": waiting, 2nd of 2")
            await cluster.add("prefill")
            await cluster.add("decode")
            for rest in ([line async for line in lines], [line async for line in more]):
                # What the official client makes of it: no event of a comment.
                events = [event.data for event in SSEDecoder().iter_bytes(iter([("\n".join(rest) + "\n").encode()]))]
                assert all(events)
                assert events[-1] == "[DONE]" or "response.completed" in events[-1]


async def test_a_stream_whose_prompt_is_computed_says_how_much_of_it(
    cluster: Cluster, pair: Any, http: httpx2.AsyncClient
) -> None:
    prefill, _ = pair
    prefill.prefill_gate.clear()
    async with http.stream("POST", PATH, json=BODIES[PATH]) as answer:
        await until_line(lines := aiter(answer.aiter_lines()), f": prefilling, {NUM_TOKENS} tokens")
        await prefill.until(lambda: prefill.commands)  # it may be on its way to the worker still
        computed = worker_pb2.PromptComputed(leg=prefill.commands[0].leg, num_tokens=2)
        prefill.say(worker_pb2.LegEvent(prompt_computed=computed))
        await until_line(lines, f": prefilling, 2 of {NUM_TOKENS}")
        prefill.prefill_gate.set()
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"


async def test_a_silence_between_tokens_is_none(cluster: Cluster, pair: Any, http: httpx2.AsyncClient) -> None:
    _, decode = pair
    decode.decode_gate.clear()
    async with http.stream("POST", PATH, json=BODIES[PATH]) as answer:
        async with asyncio.timeout(HANG_S):
            lines = aiter(answer.aiter_lines())
            while not (await anext(lines)).startswith(": decoding, 2 tokens"):
                pass
        decode.decode_gate.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("path", BODIES)
async def test_what_fails_after_a_comment_is_an_event(cluster: Cluster, http: httpx2.AsyncClient, path: str) -> None:
    conductor = cluster.router.conductor
    async with http.stream("POST", path, json=BODIES[path], headers={REQUEST_ID: "r"}) as answer:
        await until_line(lines := aiter(answer.aiter_lines()), ": waiting, 1st of 1")
        (live,) = conductor.explanations.find("r")
        conductor.coordinator.cancel(live.request_id, 0.0, WorkerFailed("injected"))
        conductor.act()
        rest = [line async for line in lines if line.startswith("data: ")]
    assert len([line for line in rest if "injected" in line]) == 1
    assert "injected" in rest[-1]


async def test_what_is_not_streamed_keeps_its_status(http: httpx2.AsyncClient) -> None:
    body = BODIES[PATH] | {"stream": False}
    late = await http.post(PATH, json=body, headers={"x-request-timeout": f"{5 * SOON_S}"})
    assert (late.status_code, late.headers["content-type"]) == (504, "application/json")


async def test_over_grpc_only_who_asks_is_told(cluster: Cluster) -> None:
    asks = aiter(cluster.inference.GenerateStream(request(response=inference_pb2.ResponseOptions(progress=True))))
    does_not = cluster.inference.GenerateStream(request())
    async with asyncio.timeout(HANG_S):
        events = [await anext(asks)]
        while events[-1].progress.of < 2:
            events.append(await anext(asks))
    assert {event.progress.state for event in events} == {State.PROGRESS_STATE_QUEUED}
    assert {event.progress.position for event in events} <= {1, 2}
    await cluster.add("prefill")
    await cluster.add("decode")
    for call in (asks, does_not):
        rest, text = await read(call)
        assert text == TEXT
        assert call is asks or not any(event.HasField("progress") for event in rest)
