"""Tests several prompts in one call of /v1/completions: each is answered as if it were alone, and all end together."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.core.clock import MonotonicClock
from services.core.errors import WorkerFailed
from services.router.coordinator.request import Phase
from services.rpc.names import Attr, Span
from tests.support.cluster import Cluster, running_cluster
from tests.support.http_client import HTTP, bare_client, events, openai_client, raw_request
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.patience import HANG_S
from tests.support.recording import recording_tracer
from tests.support.workers import DECODE, PREFILL, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS = "/v1/completions"
MODEL = "tiny-llama"
TEXTS = ["The baton is passed", "A lease", "Blocks, blocks and more blocks"]
TOKENS = [list(range(10, 60)), [9], list(range(100, 130))]
LONG = [random.Random(seed).choices(range(3, VOCAB_SIZE), k=300) for seed in range(3)]
ASKED: dict[str, Any] = {"prompt": TEXTS, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
ENDLESS: dict[str, Any] = {**ASKED, "prompt": LONG, "max_tokens": 500}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, spans: InMemorySpanExporter) -> Any:
    model: Path = tiny_model("llama", tmp_path_factory.mktemp("several"))
    async with running_cluster(
        model, [PREFILL, DECODE], router=HTTP, tracer=recording_tracer(spans), kv_blocks=400, max_num_batched_tokens=64
    ) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def quiet(cluster: Cluster) -> Any:
    yield
    await cluster.idle()


async def post(cluster: Cluster, body: Any, **headers: str) -> Any:
    async with bare_client(cluster) as client:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await client.post(COMPLETIONS, json=body, headers=named)


@pytest.mark.parametrize("prompts", [TEXTS, TOKENS], ids=["texts", "tokens"])
@pytest.mark.parametrize("echo", [False, True])
async def test_each_is_answered_as_if_it_were_alone(cluster: Cluster, prompts: Any, echo: bool) -> None:
    """All prompts have the seed, if there is one."""
    asked: dict[str, Any] = {"model": MODEL, "seed": 7, "echo": echo, **SAMPLED}
    async with openai_client(cluster) as client:
        alone = [await client.completions.create(prompt=prompt, **asked) for prompt in prompts]
        together = await client.completions.create(prompt=prompts, **asked)
        assert [choice.index for choice in together.choices] == [0, 1, 2]
        assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
        assert {choice.finish_reason for choice in together.choices} == {"length"}
        if echo and prompts is TEXTS:
            assert all(choice.text.startswith(text) for choice, text in zip(together.choices, TEXTS, strict=True))
        assert together.usage is not None
        usages = [answer.usage for answer in alone if answer.usage is not None]
        assert together.usage.prompt_tokens == sum(usage.prompt_tokens for usage in usages)
        assert together.usage.completion_tokens == sum(usage.completion_tokens for usage in usages) == 72
        assert together.usage.total_tokens == together.usage.prompt_tokens + 72
        options: Any = {"include_usage": True}
        stream = await client.completions.create(prompt=prompts, **asked, stream=True, stream_options=options)
        *chunks, last = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks]
    for index, choice in enumerate(together.choices):
        own = [other for other in choices if other.index == index]
        assert "".join(other.text for other in own) == choice.text
        assert [other.finish_reason for other in own] == [None] * (len(own) - 1) + ["length"]
    assert {chunk.id for chunk in chunks} == {last.id}
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.model_dump(exclude={"prompt_tokens_details"}) == together.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )


async def test_without_a_seed_each_has_its_own(cluster: Cluster) -> None:
    async with openai_client(cluster) as client:
        for seed, num_texts in [(None, 3), (7, 1)]:
            answer = await client.completions.create(model=MODEL, prompt=["The baton"] * 3, seed=seed, **SAMPLED)
            assert len({choice.text for choice in answer.choices}) == num_texts


async def test_a_streams_chunks_come_as_they_are_made(cluster: Cluster) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**ASKED, "max_tokens": 200, "stream": True, "stream_options": options}
    *chunks, usage, done = events((await post(cluster, asked)).text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    ends = [number for number, chunk in enumerate(chunks) if chunk["choices"][0]["finish_reason"]]
    assert sorted(chunks[number]["choices"][0]["index"] for number in ends) == [0, 1, 2]
    assert {chunk["choices"][0]["index"] for chunk in chunks[: ends[0]]} == {0, 1, 2}, "all before the first ends"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts), "that of all so far"
    assert counts[-1] == usage["usage"]["completion_tokens"] == 600


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("prompt", [TEXTS[0], TOKENS[0]], ids=["text", "tokens"])
async def test_a_list_of_one_is_that_one(cluster: Cluster, prompt: Any, stream: bool) -> None:
    async def answer(prompt: Any) -> tuple[str, dict[str, str]]:
        reply = await post(cluster, {**ASKED, "prompt": prompt, "max_tokens": 1, "stream": stream}, x_request_id="one")
        payloads = events(reply.text)[:-1] if stream else [reply.json()]
        assert {payload["id"] for payload in payloads} == {"cmpl-one"}
        text = reply.text
        for payload in payloads:
            text = text.replace(f'"created":{payload["created"]}', '"created":0')
        return text, {name: value for name, value in reply.headers.items() if name != "date"}

    await answer(prompt)  # so that both others find the same in the prefix cache
    assert await answer([prompt]) == await answer(prompt)


async def test_ids_and_traces(cluster: Cluster, spans: InMemorySpanExporter) -> None:
    spans.clear()
    caller = f"00-{TRACE_ID}-b7ad6b7169203331-01"
    answer = await post(cluster, ASKED, x_request_id="mine", traceparent=caller)
    assert (answer.json()["id"], answer.headers["x-request-id"]) == ("cmpl-mine", "mine")
    await cluster.idle()
    finished = spans.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in finished} == {TRACE_ID}
    roots = [span for span in finished if span.name == Span.REQUEST]
    assert {span.attributes[Attr.RESPONSE_ID] for span in roots} == {"mine-0", "mine-1", "mine-2"}
    assert {f"{span.parent.span_id:016x}" for span in roots} == {"b7ad6b7169203331"}


async def test_as_many_as_are_allowed(cluster: Cluster) -> None:
    answer = await post(cluster, {**ASKED, "prompt": [[number + 3] for number in range(64)], "max_tokens": 2})
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(64))
    assert answer.json()["usage"]["total_tokens"] == 64 * 3
    refused = await post(cluster, {**ASKED, "prompt": ["a"] * 65})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert refused.json()["error"]["message"] == "prompt: has 65 entries; at most 64 are allowed"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_one_that_is_refused_ends_all(cluster: Cluster, stream: bool) -> None:
    """The status says so, since nothing is streamed before all were admitted."""
    asked = {**ENDLESS, "prompt": [*LONG, [9] * 1024], "stream": stream}
    refused = await post(cluster, asked)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt[3]")
    assert error["message"].startswith("prompt[3]: This model's maximum context length is 1024 tokens")
    await cluster.idle()
    # A long text is tokenised elsewhere, while the others run.
    late = await post(cluster, {**ENDLESS, "prompt": ["a" * 400, "b " * 4000], "stream": stream})
    assert (late.status_code, late.json()["error"]["param"]) == (400, "prompt[1]")
    await cluster.idle()


def fail(cluster: Cluster, request_id: str) -> None:
    conductor = cluster.router.conductor
    live, *_ = conductor.explanations.find(request_id)
    conductor.coordinator.cancel(live.request_id, MonotonicClock().now(), WorkerFailed("it was no use"))
    conductor.act()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_one_that_fails_ends_all(cluster: Cluster, stream: bool) -> None:
    if not stream:
        answering = asyncio.create_task(post(cluster, ENDLESS, x_request_id="mine"))
        await until(lambda: cluster.workers[1].engine.stats().num_running == 3, "all are decoded", pause_s=0)
        fail(cluster, "mine-1")
        refused = await answering
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "worker_failed")
        return
    async with bare_client(cluster) as client:
        headers = {"x-request-id": "mine"}
        async with client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}, headers=headers) as answer:
            lines = answer.aiter_lines()
            async with asyncio.timeout(HANG_S):
                while json.loads((await anext(lines) or "data: null").removeprefix("data: ")) is None:
                    pass
            fail(cluster, "mine-1")
            *_, last = [json.loads(line.removeprefix("data: ")) async for line in lines if line]
    assert last["error"]["code"] == "worker_failed"
    assert cluster.router.coordinator.num_live == 0, "the others were ended before the client heard of it"


async def test_a_full_queue_refuses_all(tmp_path: Path) -> None:
    async with running_cluster(tiny_model("llama", tmp_path), [], router={**HTTP, "max_queue": 2}) as cluster:
        async with openai_client(cluster) as client:
            with pytest.raises(openai.RateLimitError) as full:
                await client.completions.create(model=MODEL, prompt=TEXTS, stream=True)
            assert full.value.code == "overloaded"
            assert cluster.router.coordinator.num_live == 0
            with pytest.raises(openai.InternalServerError) as late:
                await client.completions.create(
                    model=MODEL, prompt=TEXTS[:2], extra_headers={"X-Request-Timeout": "0.05"}
                )
            assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")


PHASES: dict[str, Callable[[Cluster], bool]] = {
    "prefilled": lambda cluster: cluster.router.coordinator.phases()[Phase.PREFILLING] > 0,
    "imported": lambda cluster: len(cluster.workers[1].imports) > 0,
    "decoded": lambda cluster: cluster.workers[1].engine.stats().num_running == 3,
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_disconnects_ends_all(cluster: Cluster, phase: str, stream: bool) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
    writer.write(raw_request(COMPLETIONS, {**ENDLESS, "stream": stream, "cache_salt": f"{phase} {stream}"}))
    await until(lambda: PHASES[phase](cluster), f"it is {phase}", 30.0, pause_s=0)
    writer.close()
    await cluster.idle()
    steps = await cluster.steps_at_rest()
    assert (await post(cluster, {**ASKED, "prompt": TEXTS[0], "max_tokens": 3})).status_code == 200
    # A chunk and two tokens, and no step of those who had left.
    assert [worker.engine.stats().num_steps for worker in cluster.workers] == [steps[0] + 1, steps[1] + 2]


async def test_a_client_that_never_reads_delays_no_one(cluster: Cluster) -> None:
    asked = {**ASKED, "prompt": [[9] * 20, [8] * 20, [7] * 20], "max_tokens": 500, "logprobs": 20, "stream": True}
    with socket.socket() as mute:
        mute.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        mute.connect(("127.0.0.1", cluster.router.http_port))
        mute.sendall(raw_request(COMPLETIONS, asked))
        await until(lambda: PHASES["decoded"](cluster), "all are decoded")
        assert (await post(cluster, ASKED)).status_code == 200
        await until(lambda: cluster.router.coordinator.num_live == 0, "all are done without their reader", 240.0)
