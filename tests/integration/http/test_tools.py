"""Tests tools and reasoning over HTTP with OpenAI's own package, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.support.http_client import events
from tests.support.tool_models import (
    HERMES_TEMPLATE,
    NOW,
    QUESTION,
    THINKING_TEMPLATE,
    WEATHER,
    ToolCluster,
    tool_cluster,
)

CALLS = (
    'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
    '<tool_call>{"name": "now"}</tool_call>'
)
EXPECTED = [("get_weather", {"city": "Rome", "days": 2}), ("now", {})]
ASKED: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": [WEATHER, NOW]}


@pytest.fixture
async def tools(tmp_path: Path) -> AsyncIterator[ToolCluster]:
    async with tool_cluster(tmp_path, HERMES_TEMPLATE) as tools:
        tools.say(CALLS)
        yield tools


def url(tools: ToolCluster) -> str:
    return f"http://127.0.0.1:{tools.cluster.router.http_port}/v1"


def client(tools: ToolCluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url(tools), api_key="none", max_retries=0)


def called(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


async def test_calls_in_one_answer(tools: ToolCluster) -> None:
    async with client(tools) as asked:
        answer = await asked.chat.completions.create(**ASKED)
        message = answer.choices[0].message
        assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", "I look.")
        assert called(message) == EXPECTED
        assert [call.type for call in message.tool_calls or []] == ["function", "function"]
        assert len({call.id for call in message.tool_calls or []}) == 2
        tools.say(CALLS.removeprefix("I look.\n"))
        assert (await asked.chat.completions.create(**ASKED)).choices[0].message.content is None


async def test_calls_in_a_stream(tools: ToolCluster) -> None:
    """The package's own accumulation of a stream must come to the same as the whole answer."""
    async with client(tools) as asked:
        async with asked.chat.completions.stream(**ASKED) as stream:
            deltas = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert (final.choices[0].finish_reason, message.content) == ("tool_calls", "I look.")
        assert called(message) == EXPECTED
        assert sum(delta.name == "get_weather" for delta in deltas) > 3


async def test_the_wire_of_a_stream(tools: ToolCluster) -> None:
    async with httpx2.AsyncClient(base_url=url(tools), trust_env=False, timeout=30.0) as bare:
        reply = await bare.post("/chat/completions", json={**ASKED, "stream": True})
    sent = events(reply.text)
    assert sent.pop() == "[DONE]"
    choices = [event["choices"][0] for event in sent]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "tool_calls")
    parts = [part for choice in choices for part in choice["delta"].get("tool_calls", ())]
    first = [part for part in parts if "id" in part]
    assert [(part["index"], part["type"], part["function"]["name"]) for part in first] == [
        (0, "function", "get_weather"),
        (1, "function", "now"),
    ]
    assert all(part["function"].keys() == {"arguments"} for part in parts if "id" not in part)
    assert [parts.index(part) for part in first] == [0, len(parts) - 1]


async def test_the_conversation_goes_on(tools: ToolCluster) -> None:
    async with client(tools) as asked:
        answer = await asked.chat.completions.create(**ASKED)
        message = answer.choices[0].message
        assert message.tool_calls
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": f"result {index}"}]}
            for index, call in enumerate(message.tool_calls)
        ]
        tools.say("Dry.")
        messages = [*QUESTION, message.model_dump(exclude_none=True), *results]
        last = await asked.chat.completions.create(**{**ASKED, "messages": messages})
        assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("Dry.", "stop")
        assert last.choices[0].message.tool_calls is None
    for part in ('"arguments": {"city": "Rome", "days": 2}', "tool get_weather\nresult 0", "tool now\nresult 1"):
        assert part in tools.prompt()


async def test_at_most_one_call(tools: ToolCluster) -> None:
    async with client(tools) as asked:
        answer = await asked.chat.completions.create(**ASKED, parallel_tool_calls=False)
        assert called(answer.choices[0].message) == EXPECTED[:1]
        answer = await asked.chat.completions.create(**ASKED, tool_choice="none")
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALLS, "stop")


async def test_only_some_of_the_tools(tools: ToolCluster) -> None:
    async with client(tools) as asked:
        answer = await asked.chat.completions.create(**ASKED, tool_choice=allowed("auto", "now"))
        assert called(answer.choices[0].message) == EXPECTED[1:]
        assert "get_weather" not in tools.cluster.scripted[0].commands[-1].constraint.grammar


async def test_tools_or_a_schema(tools: ToolCluster) -> None:
    """Agents ask for both: a call, or an answer in a form."""
    held = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    async with client(tools) as asked:
        for said_, content in ((CALLS.removeprefix("I look.\n"), None), ('{"a": 1}', '{"a": 1}')):
            tools.say(said_)
            answer = await asked.chat.completions.create(**ASKED, response_format=held)
            assert answer.choices[0].message.content == content


async def test_what_is_thought(tmp_path: Path) -> None:
    async with tool_cluster(tmp_path, THINKING_TEMPLATE) as tools, client(tools) as asked:
        tools.say("I must ask.\n</think>\n\nDry.")
        fields: dict[str, Any] = {"model": "tiny", "messages": QUESTION}
        answer = await asked.chat.completions.create(**fields)
        message = answer.choices[0].message.model_dump()
        assert (message["content"], message["reasoning_content"]) == ("Dry.", "I must ask.")
        deltas = [
            chunk.choices[0].delta.model_dump()
            async for chunk in await asked.chat.completions.create(**fields, stream=True, logprobs=True)
        ]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "I must ask."
        assert "".join(delta["content"] or "" for delta in deltas) == "Dry."
        spoken = [*QUESTION, {"role": "assistant", "content": "Dry.", "reasoning_content": "I asked."}, *QUESTION]
        await asked.chat.completions.create(**{**fields, "messages": spoken})
        assert "<think>I asked.</think>Dry." in tools.prompt()


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


def said(**message: Any) -> list[Any]:
    return [*QUESTION, message]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [tool()] * 2}, "tools[1].function.name"),
    ({"tools": [tool()] * 129}, "tools"),
    ({"tools": [tool(name="no name")]}, "tools[0].function.name"),
    ({"tools": [tool(name=1)]}, "tools[0].function.name"),
    ({"tools": [tool(description="x" * 20_000)]}, "tools[0].function.description"),
    ({"tools": [tool(parameters="{}")]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"a": "x" * 70_000})]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"a": [1] * 17_000})]}, "tools[0].function.parameters"),
    ({"tools": [tool(name=f"f{n}", parameters={"a": "x" * 60_000}) for n in range(5)]}, "tools"),
    ({"tools": [tool(parameters={"a": "\ud800"})]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": {}}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": allowed("sometimes", "f")}, "tool_choice.allowed_tools.mode"),
    ({"tools": [tool()], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    ({"tools": [tool()], "tool_choice": allowed("auto", "f", "g")}, "tool_choice.allowed_tools.tools[1]"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"messages": said(role="tool", content="x")}, "messages[1].tool_call_id"),
    ({"messages": said(role="user", content="x", tool_call_id="1")}, "messages[1].tool_call_id"),
    ({"messages": said(role="user", content="x", tool_calls=[CALL])}, "messages[1].tool_calls"),
    ({"messages": said(role="user", content="x", reasoning_content="x")}, "messages[1].reasoning_content"),
    ({"messages": said(role="assistant", tool_calls=[{**CALL, "type": "custom"}])}, "messages[1].tool_calls[0].type"),
    (
        {"messages": said(role="assistant", tool_calls=[{**CALL, "function": {"name": "f", "arguments": {}}}])},
        "messages[1].tool_calls[0].function.arguments",
    ),
    ({"messages": said(role="assistant", tool_calls=[{"id": "1"}])}, "messages[1].tool_calls[0].function.name"),
    ({"messages": said(role="assistant", tool_calls=[CALL] * 129)}, "messages[1].tool_calls"),
    ({"messages": said(role="assistant", function_call={"name": "f"})}, "messages[1].function_call"),
    ({"messages": said(role="function", name="f", content="x")}, "messages[1].role"),
    ({"messages": said(role="user", content="x", name="x" * 129)}, "messages[1].name"),
]


async def test_tools_count_as_tokens(tools: ToolCluster) -> None:
    async with httpx2.AsyncClient(base_url=url(tools).removesuffix("/v1"), trust_env=False, timeout=30.0) as bare:
        counted = (await bare.post("/tokenize", json=ASKED)).json()
        none = (await bare.post("/tokenize", json={**ASKED, "tool_choice": "none"})).json()
    async with client(tools) as asked:
        answer = await asked.chat.completions.create(**ASKED)
    assert answer.usage is not None
    assert counted["count"] == answer.usage.prompt_tokens > none["count"] + 50


async def test_what_is_refused(tools: ToolCluster) -> None:
    async with httpx2.AsyncClient(base_url=url(tools), trust_env=False, timeout=30.0) as bare:
        for fields, param in REFUSED:
            body = json.dumps({"model": "tiny", "messages": QUESTION, **fields})
            headers = {"content-type": "application/json"}
            reply = await bare.post("/chat/completions", content=body, headers=headers)
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, param), error
            assert error["message"].startswith(param)
        nothing = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "functions": []}
        reply = await bare.post("/chat/completions", json={"model": "tiny", "messages": QUESTION, **nothing})
        assert reply.json()["choices"][0]["message"]["content"] == CALLS
