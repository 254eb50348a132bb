"""Tests the official openai package against a split cluster: each call, streamed and not, and
equal to gRPC's answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from baton.v1 import inference_pb2, types_pb2
from services.router.text.tokenisation import load_model_text
from services.worker.config import WorkerConfig
from tests.support.cluster import Answer, Cluster, running_cluster
from tests.support.http_client import HTTP, address, openai_client
from tests.support.models import tiny_model
from tests.support.workers import DECODE, PREFILL, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "tiny-llama"
PROMPT = "The baton is passed"
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a lease?"}]
SAMPLING: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "presence_penalty": 0.5}
EXTRAS: dict[str, Any] = {"ignore_eos": True, "top_k": 50, "min_p": 0.001, "repetition_penalty": 1.1, "min_tokens": 3}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model: Path = tiny_model("llama", tmp_path_factory.mktemp("openai"))
    async with running_cluster(model, [PREFILL, DECODE], router=HTTP, kv_blocks=400) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def quiet(cluster: Cluster) -> Any:
    yield
    await cluster.idle()


def grpc_request(max_tokens: int, logprobs: int | None = None, **prompt: Any) -> inference_pb2.GenerateRequest:
    """Returns what SAMPLING and EXTRAS are over gRPC."""
    return inference_pb2.GenerateRequest(
        sampling=types_pb2.SamplingParams(
            temperature=0.9, top_p=0.9, seed=7, presence_penalty=0.5, top_k=50, min_p=0.001, repetition_penalty=1.1
        ),
        stopping=types_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True, min_tokens=3),
        response=inference_pb2.ResponseOptions(logprobs=logprobs),
        **prompt,
    )


def chat_request(**fields: Any) -> inference_pb2.GenerateRequest:
    messages = [inference_pb2.ChatMessage(**entry) for entry in MESSAGES]
    return grpc_request(24, messages=inference_pb2.ChatMessages(messages=messages), **fields)


def check_usage(usage: Any, answer: Answer) -> None:
    assert answer.completion is not None
    expected = answer.completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_tokens, expected.output_tokens)
    assert usage.total_tokens == expected.prompt_tokens + expected.output_tokens


async def test_models(cluster: Cluster) -> None:
    async with openai_client(cluster) as client:
        (model,) = (await client.models.list()).data
        assert (model.id, model.object, model.owned_by) == (MODEL, "model", "baton")
        assert model.model_dump()["max_model_len"] == 1024
        assert await client.models.retrieve(MODEL) == model
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("org/other")
        assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT], list(range(10, 60)), [list(range(10, 60))]])
async def test_completion_is_what_grpc_answers(cluster: Cluster, prompt: Any) -> None:
    bare = prompt[0] if isinstance(prompt[0], str | list) and not isinstance(prompt, str) else prompt
    fields = {"text": bare} if isinstance(bare, str) else {"token_ids": inference_pb2.TokenIds(ids=bare)}
    expected = await cluster.stream(grpc_request(24, **fields))
    async with openai_client(cluster) as client:
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": 24, **SAMPLING, "extra_body": EXTRAS}
        answer = await client.completions.create(**asked)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, choice.logprobs) == (expected.text, "length", None)
        check_usage(answer.usage, expected)
        assert answer.id.startswith("cmpl-req-")
        stream = await client.completions.create(**asked, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_chat_is_what_grpc_answers(cluster: Cluster) -> None:
    expected = await cluster.stream(chat_request())
    async with openai_client(cluster) as client:
        asked = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 24, **SAMPLING, "extra_body": EXTRAS}
        answer = await client.chat.completions.create(**asked)
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
        assert choice.finish_reason == "length"
        check_usage(answer.usage, expected)
        stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        *chunks, last = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
        assert last.choices == []
        check_usage(last.usage, expected)
        parts = [{"type": "text", "text": MESSAGES[1]["content"]}]
        asked["messages"] = [MESSAGES[0], {"role": "user", "content": parts}]
        assert (await client.chat.completions.create(**asked)).choices[0].message.content == expected.text


async def test_the_package_without_asyncio(cluster: Cluster) -> None:
    expected = await cluster.stream(chat_request())

    def calls() -> tuple[str | None, str, str]:
        with openai.OpenAI(base_url=f"{address(cluster)}/v1", api_key="none", max_retries=0) as client:
            asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, **SAMPLING, "extra_body": EXTRAS}
            whole = client.chat.completions.create(**asked).choices[0].message.content
            chunks = client.chat.completions.create(**asked, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            completion = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, temperature=0)
            return whole, streamed, completion.choices[0].text

    whole, streamed, completion = await asyncio.to_thread(calls)
    assert whole == streamed == expected.text
    greedy = inference_pb2.GenerateRequest(text=PROMPT)
    greedy.sampling.temperature, greedy.stopping.max_tokens = 0.0, 3
    assert completion == (await cluster.stream(greedy)).text


async def test_chat_logprobs_are_those_of_grpc(cluster: Cluster) -> None:
    expected = await cluster.stream(chat_request(logprobs=3))
    async with openai_client(cluster) as client:
        asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, **SAMPLING, "extra_body": EXTRAS}
        asked |= {"logprobs": True, "top_logprobs": 3}
        whole = (await client.chat.completions.create(**asked)).choices[0].logprobs
        assert whole is not None
        assert whole.content is not None
        streamed = []
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            if chunk.choices[0].logprobs is not None:
                streamed += chunk.choices[0].logprobs.content or []
    assert streamed == whole.content
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in expected.logprobs]
    for entry, other in zip(streamed, expected.logprobs, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == [top.logprob for top in other.top]
    # Each token brings its own bytes, so that together they are the text, characters in several tokens included.
    data = b"".join(bytes(entry.bytes or []) for entry in streamed)
    special = [token for token in ("<|pad|>", "<|im_start|>", "<|im_end|>") if token.encode() in data]
    assert special or data.decode(errors="replace") == expected.text


async def test_completion_logprobs_and_echo(cluster: Cluster) -> None:
    async with openai_client(cluster) as client:
        asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        logprobs = (await client.completions.create(**asked, logprobs=2)).choices[0].logprobs
        assert logprobs is not None
        assert len(logprobs.tokens or []) == 12
        for token, logprob, top in zip(
            logprobs.tokens or [], logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True
        ):
            assert top[token] == logprob
            assert logprob == max(top.values()), "greedy"
        plain = (await client.completions.create(**asked)).choices[0].text
        echoed = (await client.completions.create(**asked, echo=True)).choices[0].text
        assert echoed == PROMPT + plain
        stream = await client.completions.create(**asked, echo=True, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == PROMPT + plain
        config = cluster.workers[0].config
        assert isinstance(config, WorkerConfig)
        ids = load_model_text(config.model).encode_text(PROMPT)
        assert (await client.completions.create(**{**asked, "prompt": ids}, echo=True)).choices[0].text == echoed


async def test_stops(cluster: Cluster) -> None:
    async with openai_client(cluster) as client:
        asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        plain = await client.completions.create(**asked, extra_body={"ignore_eos": True})
        stop = plain.choices[0].text[4:6]
        choice = (await client.completions.create(**asked, stop=stop, extra_body={"ignore_eos": True})).choices[0]
        assert (choice.finish_reason, choice.model_dump()["stop_reason"]) == ("stop", stop)
        assert choice.text == plain.choices[0].text[: plain.choices[0].text.index(stop)]
        forced = {"logit_bias": {"77": 100}, "extra_body": {"stop_token_ids": [77], "ignore_eos": True}}
        choice = (await client.completions.create(**asked, **forced)).choices[0]
        assert (choice.finish_reason, choice.model_dump()["stop_reason"]) == ("stop", 77)
        assert (
            await client.completions.create(model=MODEL, prompt=PROMPT, temperature=0)
        ).usage.completion_tokens <= 16


async def test_errors_are_the_packages_own(cluster: Cluster) -> None:
    async with openai_client(cluster) as client:
        chat: Any = client.chat.completions.create
        with pytest.raises(openai.NotFoundError, match="not served") as missing:
            await chat(model="gpt-9", messages=MESSAGES)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="temperature: is 101") as bad:
                await chat(model=MODEL, messages=MESSAGES, temperature=101, stream=stream)
            assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
            assert bad.value.request_id
        with pytest.raises(openai.BadRequestError, match="tools: are not supported"):
            await chat(model=MODEL, messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}])
        with pytest.raises(openai.BadRequestError, match="suffix: is not supported"):
            await client.completions.create(model=MODEL, prompt=PROMPT, suffix="end")


async def test_what_no_context_holds_is_told_as_openai_tells_it(cluster: Cluster) -> None:
    """LangChain, LiteLLM and others can tell it by the code, or by these words in the message."""
    words = "This model's maximum context length is 1024 tokens"
    long: Any = [{"role": "user", "content": "baton " * 1024}]
    async with openai_client(cluster) as client:
        for asked, param in [
            ({"prompt": [9] * 1024}, "prompt"),
            ({"prompt": "x" * 100_000}, "prompt"),
            ({"prompt": [9] * 24, "max_tokens": 1001}, "max_tokens"),
        ]:
            with pytest.raises(openai.BadRequestError, match=f"{param}: {words}") as caught:
                await client.completions.create(model=MODEL, **asked)
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
        for asked, param in [
            ({"messages": long}, "messages"),
            ({"messages": MESSAGES, "max_tokens": 1024}, "max_tokens"),
            ({"messages": MESSAGES, "max_completion_tokens": 1024}, "max_completion_tokens"),
        ]:
            with pytest.raises(openai.BadRequestError, match=f"{param}: {words}") as caught:
                await client.chat.completions.create(model=MODEL, **asked, stream=True)
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


async def test_a_full_queue_is_a_rate_limit_and_the_package_comes_back(tmp_path: Path) -> None:
    async with running_cluster(tiny_model("llama", tmp_path), [], router={**HTTP, "max_queue": 1}) as cluster:
        async with openai_client(cluster) as client:
            waiting = asyncio.create_task(client.completions.create(model=MODEL, prompt=PROMPT))
            await until(lambda: cluster.router.coordinator.num_live == 1, "the queue is full")
            with pytest.raises(openai.RateLimitError) as full:
                await client.completions.create(model=MODEL, prompt=PROMPT)
            assert full.value.code == "overloaded"
            assert int(full.value.response.headers["retry-after"]) >= 1
            waiting.cancel()  # closes its connection
            patient = client.with_options(max_retries=2)
            with pytest.raises(openai.InternalServerError) as late:  # queued now, and then out of time
                await patient.completions.create(
                    model=MODEL, prompt=PROMPT, extra_headers={"X-Request-Timeout": "0.05"}, timeout=30
                )
            assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")


async def test_no_worker_in_time(tmp_path: Path) -> None:
    flags = {**HTTP, "no_worker_timeout_s": 0.1}
    async with running_cluster(tiny_model("llama", tmp_path), [], router=flags) as cluster:
        async with openai_client(cluster) as client:
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError) as caught:
                    await client.completions.create(model=MODEL, prompt=PROMPT, stream=stream)
                assert (caught.value.status_code, caught.value.code) == (503, "no_worker")
                assert int(caught.value.response.headers["retry-after"]) >= 1
