"""Tests tools, reasoning and JSON in /v1/responses with OpenAI's own package."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.cluster import running_cluster
from tests.support.http_client import HTTP, bare_client, openai_client
from tests.support.models import tiny_model
from tests.support.tool_models import HERMES_TEMPLATE, THINKING_TEMPLATE, WEATHER_SCHEMA, ToolCluster, tool_cluster
from tests.support.workers import DECODE, PREFILL

CALLS = (
    'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
    '<tool_call>{"name": "now"}</tool_call>'
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": WEATHER_SCHEMA,
    "strict": False,
}
NOW: dict[str, Any] = {"type": "function", "name": "now", "parameters": None, "strict": False}
ASKED: dict[str, Any] = {"model": "tiny", "input": "How is the weather in Rome?", "tools": [WEATHER, NOW]}


@pytest.fixture
async def tools(tmp_path: Path) -> AsyncIterator[ToolCluster]:
    async with tool_cluster(tmp_path, HERMES_TEMPLATE) as tools:
        tools.say(CALLS)
        yield tools


def client(tools: ToolCluster) -> openai.AsyncOpenAI:
    url = f"http://127.0.0.1:{tools.cluster.router.http_port}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


def told(response: Any) -> list[Any]:
    """Returns what the items say."""
    return [
        (item.name, json.loads(item.arguments)) if item.type == "function_call" else item.content[0].text
        for item in response.output
    ]


EXPECTED = ["I look.", ("get_weather", {"city": "Rome", "days": 2}), ("now", {})]


async def test_calls_are_items(tools: ToolCluster) -> None:
    async with client(tools) as asked:
        response = await asked.responses.create(**ASKED)
        assert (response.status, told(response)) == ("completed", EXPECTED)
        assert [tool.name for tool in response.tools if tool.type == "function"] == ["get_weather", "now"]
        calls = [item for item in response.output if item.type == "function_call"]
        assert len({call.call_id for call in calls}) == 2
        assert '"name": "get_weather"' in tools.prompt()


async def test_a_stream_of_calls_comes_to_the_same(tools: ToolCluster) -> None:
    async with client(tools) as asked:
        async with asked.responses.stream(**ASKED) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert told(final) == EXPECTED
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == "".join(item.arguments for item in final.output if item.type == "function_call")
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [event.output_index for event in done] == [1, 2]


async def test_results_are_sent_back_with_the_items(tools: ToolCluster) -> None:
    async with client(tools) as asked:
        response = await asked.responses.create(**ASKED)
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": f"result {item.name}"}
            for item in response.output
            if item.type == "function_call"
        ]
        tools.say("Dry.")
        items: list[Any] = [{"role": "user", "content": ASKED["input"]}, *response.output, *results]
        last = await asked.responses.create(**{**ASKED, "input": items})
        assert last.output_text == "Dry."
    prompt = tools.prompt()
    assert prompt.count("assistant\n") == 2, "text and both calls are one message"
    for part in ('"arguments": {"city": "Rome", "days": 2}', "result get_weather", "result now"):
        assert part in prompt


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


async def test_only_some_of_the_tools_are_called(tools: ToolCluster) -> None:
    async with client(tools) as asked:
        response = await asked.responses.create(**ASKED, tool_choice=allowed("auto", "now"))
        assert told(response)[-1] == EXPECTED[-1]
        assert [item.type for item in response.output].count("function_call") == 1
        assert response.tool_choice.to_dict() == allowed("auto", "now")


async def test_what_a_model_thinks_is_an_item(tmp_path: Path) -> None:
    async with tool_cluster(tmp_path, THINKING_TEMPLATE) as tools, client(tools) as asked:
        tools.say("Let me see.\n</think>\n\nIt is dry.")
        response = await asked.responses.create(model="tiny", input="How is it?")
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert response.output_text == "It is dry."
        assert "Let me see." in response.output[0].to_dict()["content"][0]["text"]
        assert response.usage is not None
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
        kinds = [event.type async for event in await asked.responses.create(model="tiny", input="How?", stream=True)]
        assert "response.reasoning_text.delta" in kinds
        assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**WEATHER, "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
    ({"tool_choice": {"type": "function", "name": "gone"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"tool_choice": allowed("sometimes", "now")}, "tool_choice.mode"),
    ({"tool_choice": allowed("auto", "now", "gone")}, "tool_choice.tools[1]"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "", "arguments": "{}"}]}, "input[0].content[0].name"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[param for _, param in REFUSED])
async def test_what_is_wrong_is_named(tools: ToolCluster, fields: dict[str, Any], param: str) -> None:
    async with client(tools) as asked:
        with pytest.raises(openai.BadRequestError) as refused:
            await asked.responses.create(**{**ASKED, **fields})
    assert refused.value.param == param


async def test_text_is_held_to_a_schema(tmp_path: Path) -> None:
    """The model is a random one, split over two workers."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    formatted = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    async with running_cluster(tiny_model("llama", tmp_path), [PREFILL, DECODE], router=HTTP, kv_blocks=100) as cluster:
        async with openai_client(cluster) as asked:
            for seed in range(3):
                response = await asked.responses.create(
                    model="tiny-llama", input="a", text=formatted, max_output_tokens=200, extra_body={"seed": seed}
                )
                if response.status == "completed":
                    answer = json.loads(response.output_text)
                    assert answer.keys() == {"ok", "kind"}
                    assert isinstance(answer["ok"], bool)
                    assert answer["kind"] in ("a", "b")
                    return
        async with bare_client(cluster) as bare:
            assert (await bare.get("/health")).status_code == 200
    pytest.fail("no answer ended")
