"""Tests /tokenize and /detokenize: they count as prompts are counted, and are bounded as these are."""

from __future__ import annotations

from typing import Any

import pytest

from baton.v1 import inference_pb2
from services.router.front.http.tokenise import MOST_TOKENS
from tests.support.cluster import Cluster
from tests.support.http_client import bare_client

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "The bäton is passed 🏃<|im_end|>"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Why?"}]}]


async def ask(cluster: Cluster, path: str, **body: Any) -> Any:
    async with bare_client(cluster) as client:
        response = await client.post(path, json=body)
        return response.json()


async def refused(cluster: Cluster, path: str, **body: Any) -> tuple[str, str]:
    error = (await ask(cluster, path, **body))["error"]
    return error["param"], error["message"]


async def test_a_text_is_the_tokens_that_a_prompt_would_be(cluster: Cluster) -> None:
    answer = await ask(cluster, "/tokenize", prompt=TEXT, return_token_strs=True)
    request = inference_pb2.GenerateRequest(text=TEXT)
    request.stopping.max_tokens, request.response.echo_token_ids = 1, True
    assert answer["tokens"] == list((await cluster.stream(request)).prompt_info.token_ids)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 80)
    assert len(answer["token_strs"]) == answer["count"]
    assert answer["token_strs"][-1] == "<|im_end|>"
    whole = await ask(cluster, "/detokenize", tokens=answer["tokens"])
    bare = await ask(cluster, "/tokenize", prompt=TEXT, add_special_tokens=False, model="tiny-llama")
    assert bare["tokens"] == answer["tokens"][-bare["count"] :]
    assert bare["token_strs"] is None
    assert await ask(cluster, "/detokenize", tokens=bare["tokens"]) == {"prompt": TEXT}
    assert whole["prompt"].endswith(TEXT)


async def test_messages_are_counted_as_the_template_writes_them(cluster: Cluster) -> None:
    answer = await ask(cluster, "/tokenize", messages=MESSAGES, add_generation_prompt=True)
    request = inference_pb2.GenerateRequest()
    for role, content in (("system", "Be brief."), ("user", "Why?")):
        request.messages.messages.add(role=role, content=content)
    request.stopping.max_tokens, request.response.echo_token_ids = 1, True
    assert answer["tokens"] == list((await cluster.stream(request)).prompt_info.token_ids)
    special = await ask(cluster, "/tokenize", messages=MESSAGES, add_special_tokens=True)
    assert special["tokens"][-answer["count"] :] == answer["tokens"]


async def test_what_no_context_holds_can_be_counted(cluster: Cluster) -> None:
    assert (await ask(cluster, "/tokenize", prompt="baton " * 1000))["count"] > 1000
    assert await ask(cluster, "/detokenize", tokens=[]) == {"prompt": ""}


async def test_what_is_wrong_is_named(cluster: Cluster) -> None:
    for body, param, words in [
        ({}, "prompt", "is missing"),
        ({"prompt": "a", "messages": MESSAGES}, "messages", "together with prompt"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": 3}, "prompt", "must be a string"),
        ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens", "true or false"),
        ({"prompt": "x" * (MOST_TOKENS * 8)}, "prompt", "are given back"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "'robot'"),
        ({"prompt": "a", "model": "other"}, "model", "not served"),
    ]:
        named, message = await refused(cluster, "/tokenize", **body)
        assert (named, words in message) == (param, True), message
    for body, param, words in [
        ({}, "tokens", "is missing"),
        ({"tokens": "a"}, "tokens", "must be a list"),
        ({"tokens": [1, "a"]}, "tokens[1]", "must be a whole number"),
        ({"tokens": [1, -1]}, "tokens", "outside [0, 320)"),
        ({"tokens": [1] * (MOST_TOKENS + 1)}, "tokens", "at most"),
    ]:
        named, message = await refused(cluster, "/detokenize", **body)
        assert (named, words in message) == (param, True), message
