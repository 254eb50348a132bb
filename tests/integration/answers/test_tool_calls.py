"""Tests required and strict calls of tools with random models: they must call, with arguments valid under the schema;
split over two workers they output the same as unsplit, over gRPC and over HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import inference_pb2, types_pb2
from tests.support.cluster import Answer, Cluster, running_cluster
from tests.support.http_client import HTTP, openai_client
from tests.support.models import tiny_model
from tests.support.tool_models import HERMES_TEMPLATE, LLAMA_TEMPLATE, MISTRAL_TEMPLATE
from tests.support.workers import DECODE, PREFILL

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo", "Jaén"]}, "days": {"type": "integer", "enum": [1, 2, 14]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [inference_pb2.Tool(name=name, parameters_schema=json.dumps(schema)) for name, schema in SCHEMAS.items()]
REQUIRED = inference_pb2.ToolChoice(mode=inference_pb2.TOOL_MODE_REQUIRED)
NO_THOUGHTS = {"reasoning_parser": ("none",)}
"""A random model that may think first does not come to an end with it."""
TOOL_CALLS = types_pb2.FINISH_REASON_TOOL_CALLS


def model_with(template: str, parent: Path) -> Path:
    model = tiny_model("llama", parent)
    (model / "chat_template.jinja").write_text(template)
    return model


def request(seed: int, **fields: Any) -> inference_pb2.GenerateRequest:
    messages = [inference_pb2.ChatMessage(role="user", content=f"How is the weather in town {seed}?")]
    asked = inference_pb2.GenerateRequest(
        messages=inference_pb2.ChatMessages(messages=messages),
        tools=TOOLS,
        sampling=types_pb2.SamplingParams(seed=seed),
        stopping=types_pb2.StoppingParams(max_tokens=250),
    )
    asked.MergeFrom(inference_pb2.GenerateRequest(**fields))
    return asked


async def answers(cluster: Cluster) -> list[Answer]:
    named = inference_pb2.ToolChoice(function="get_weather")
    one = {"tool_choice": REQUIRED, "parallel_tool_calls": False}
    asked = [request(seed, tool_choice=named) for seed in range(2)] + [request(seed, **one) for seed in range(2)]
    return await asyncio.gather(*map(cluster.stream, [*asked, request(0, tool_choice=REQUIRED)]))


def check_arguments(name: str, arguments: str) -> None:
    said, properties = json.loads(arguments), SCHEMAS[name]["properties"]
    assert said.keys() == properties.keys()
    assert all(said[each] in properties[each]["enum"] for each in said)


def check(answer: Answer) -> int:
    """Asserts that the calls are valid and returns their number."""
    assert answer.completion is not None
    assert answer.text == ""
    for name, arguments in answer.calls:
        check_arguments(name, arguments)
    return len(answer.calls)


@pytest.mark.parametrize(
    "template",
    [
        HERMES_TEMPLATE,
        pytest.param(LLAMA_TEMPLATE, marks=pytest.mark.long),
        pytest.param(MISTRAL_TEMPLATE, marks=pytest.mark.long),
    ],
    ids=["hermes", "llama", "mistral"],
)
async def test_required_calls_split_and_unsplit(tmp_path: Path, template: str) -> None:
    model = model_with(template, tmp_path)
    async with running_cluster(model, [PREFILL, DECODE], router=NO_THOUGHTS, kv_blocks=400) as cluster:
        divided = await answers(cluster)
    async with running_cluster(model, [DECODE], router=NO_THOUGHTS, kv_blocks=400) as cluster:
        whole = await answers(cluster)
    assert [answer.token_ids for answer in divided] == [answer.token_ids for answer in whole]
    counts = [check(answer) for answer in divided if answer.completion.finish_reason == TOOL_CALLS]
    assert len(counts) >= 3, "most must end"
    assert all(counts)
    assert [len(answer.calls) for answer in divided[:4]] == [1, 1, 1, 1]
    assert {name for answer in divided[:2] for name, _ in answer.calls} == {"get_weather"}


async def test_strict_tools_over_http(tmp_path: Path) -> None:
    """A random model does not ask for tools; told to begin with a call by a bias, it must make a valid one."""
    model = model_with(HERMES_TEMPLATE, tmp_path)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name, schema in SCHEMAS.items()
    ]
    messages: list[Any] = [{"role": "user", "content": "Hm?"}]
    async with running_cluster(model, [PREFILL, DECODE], router={**HTTP, **NO_THOUGHTS}, kv_blocks=400) as cluster:
        async with openai_client(cluster) as client:
            create: Any = client.chat.completions.create
            fields = {"model": "tiny-llama", "messages": messages, "tools": tools, "seed": 5, "max_tokens": 200}
            free = await create(**fields)
            assert free.choices[0].message.tool_calls is None
            assert free.choices[0].message.content
            named = {"type": "function", "function": {"name": "now"}}
            forced = await create(**fields, tool_choice=named)
            (call,) = forced.choices[0].message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})
            assert forced.choices[0].finish_reason == "tool_calls"
            async with client.chat.completions.stream(**fields, tool_choice="required") as stream:  # type: ignore[arg-type]
                final = await stream.get_final_completion()
            for call in final.choices[0].message.tool_calls or []:
                check_arguments(call.function.name, call.function.arguments)
            assert final.choices[0].message.tool_calls
