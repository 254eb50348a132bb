"""Tests what clients give a chat template beside its own variables, over HTTP and gRPC."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.v1 import inference_pb2
from services.router.front.validation import MAX_VARIABLE_CHARS, MAX_VARIABLES
from tests.support.tenants import http_client
from tests.support.tool_models import ToolCluster, tool_cluster

# As Qwen3's does.
TEMPLATE = (
    "{% if date is defined %}{{ date }}|{% endif %}{{ messages[-1].content }}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
HI: list[Any] = [{"role": "user", "content": "hi"}]
KWARGS = "chat_template_kwargs"


@pytest.fixture
async def tools(tmp_path: Path) -> AsyncIterator[ToolCluster]:
    async with tool_cluster(tmp_path, TEMPLATE) as tools:
        yield tools


@pytest.fixture
async def http(tools: ToolCluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with http_client(tools.cluster) as http:
        yield http


@pytest.mark.parametrize(
    ("given", "before", "after"),
    [
        ({"enable_thinking": False}, "", "<think>\n\n</think>\n\n"),
        ({"enable_thinking": True, "date": None}, "", ""),
        ({"date": "26 Jul", "unknown": 1}, "26 Jul|", ""),
        ({"date": 7}, "7|", ""),
        ({"date": 7.5}, "7.5|", ""),
        ({}, "", ""),
        (None, "", ""),
    ],
)
async def test_the_template_is_given_them(
    tools: ToolCluster, http: httpx2.AsyncClient, given: Any, before: str, after: str
) -> None:
    expected = f"{before}hiassistant\n{after}"
    chat = {"messages": HI, KWARGS: given, "max_tokens": 2}
    assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
    assert tools.prompt() == expected
    response = {"input": "hi", KWARGS: given, "max_output_tokens": 2}
    assert (await http.post("/v1/responses", json=response)).status_code == 200
    assert tools.prompt() == expected
    counted = (await http.post("/tokenize", json={"messages": HI, KWARGS: given})).json()["tokens"]
    assert tools.tokenizer.decode(counted) == expected


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"messages": "x"}, f"{KWARGS}.messages", "the server sets"),
        ({"bos_token": ""}, f"{KWARGS}.bos_token", "the server sets"),
        ({"add_generation_prompt": False}, f"{KWARGS}.add_generation_prompt", "the server sets"),
        ({"documents": []}, f"{KWARGS}.documents", "must be"),
        ({"a": {"b": 1}}, f"{KWARGS}.a", "must be a text, a number, true or false"),
        ({"a": 1 << 40}, f"{KWARGS}.a", "out of range"),
        ({"a": "\ud800"}, f"{KWARGS}.a", "surrogate"),
        ({"\ud800": 1}, KWARGS, "surrogate"),
        ({"a" * 129: 1}, KWARGS, "129 characters"),
        ({"a": "x" * (MAX_VARIABLE_CHARS + 1)}, f"{KWARGS}.a", "characters"),
        (dict.fromkeys(map(str, range(MAX_VARIABLES + 1)), 1), KWARGS, "33 entries"),
        ([], KWARGS, "must be an object"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
async def test_what_is_wrong_is_named(http: httpx2.AsyncClient, path: str, given: Any, param: str, words: str) -> None:
    prompt = {"input": "hi"} if path == "/v1/responses" else {"messages": HI}
    body = json.dumps({**prompt, KWARGS: given}).encode()
    answer = await http.post(path, content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]


async def test_completions_have_no_template(http: httpx2.AsyncClient) -> None:
    asked = {"prompt": "hi", "max_tokens": 1}
    assert (await http.post("/v1/completions", json={**asked, KWARGS: {}})).status_code == 200
    refused = await http.post("/v1/completions", json={**asked, KWARGS: {"enable_thinking": False}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, KWARGS)


async def test_over_grpc(tools: ToolCluster) -> None:
    messages = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(**HI[0])])
    messages.template_variables.add(name="enable_thinking", boolean=False)
    messages.template_variables.add(name="date", text="now")
    request = inference_pb2.GenerateRequest(messages=messages)
    request.stopping.max_tokens = 2
    await tools.cluster.inference.Generate(request)
    assert tools.prompt() == "now|hiassistant\n<think>\n\n</think>\n\n"
