"""Tests /v1/responses with the official openai package against a split cluster: whole, streamed, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from services.core.errors import WorkerFailed
from tests.support.cluster import Cluster, running_cluster
from tests.support.http_client import HTTP, bare_client, openai_client
from tests.support.models import tiny_model
from tests.support.workers import DECODE, PREFILL

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "tiny-llama"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model: Path = tiny_model("llama", tmp_path_factory.mktemp("responses"))
    async with running_cluster(model, [PREFILL, DECODE], router=HTTP, kv_blocks=400) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def quiet(cluster: Cluster) -> Any:
    yield
    await cluster.idle()


async def chat_text(client: openai.AsyncOpenAI, messages: list[Any], max_tokens: int = 12) -> str:
    answer = await client.chat.completions.create(**GREEDY, messages=messages, max_tokens=max_tokens)
    return answer.choices[0].message.content or ""


async def test_a_text_is_answered_as_a_chat_is(cluster: Cluster) -> None:
    async with openai_client(cluster) as client:
        asked: dict[str, Any] = {**GREEDY, "input": "What is a lease?", "max_output_tokens": 12}
        response = await client.responses.create(**asked, instructions="Be brief.", metadata={"for": "me"})
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a lease?"}]
        assert response.output_text == await chat_text(client, messages)
        assert (response.object, response.status, response.model) == ("response", "incomplete", MODEL)
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.metadata == {"for": "me"}
        assert (response.instructions, response.max_output_tokens, response.temperature) == ("Be brief.", 12, 0.0)
        assert response.id.startswith("resp_")
        assert response.error is None
        assert response.to_dict()["store"] is False
        assert response.usage is not None
        assert response.usage.output_tokens == 12
        assert response.usage.total_tokens == response.usage.input_tokens + 12
        item: Any = response.output[0]
        assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
        again = await client.responses.create(**asked, instructions="Be brief.")
        assert again.usage is not None
        assert again.usage.input_tokens_details.cached_tokens > 0


async def test_items_are_a_conversation(cluster: Cluster) -> None:
    async with openai_client(cluster) as client:
        items: list[Any] = [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is a lease?"}]},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "A promise.", "annotations": []}],
            },
            {"role": "user", "content": "Of what?"},
        ]
        response = await client.responses.create(**GREEDY, input=items, max_output_tokens=12)
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is a lease?"},
            {"role": "assistant", "content": "A promise."},
            {"role": "user", "content": "Of what?"},
        ]
        assert response.output_text == await chat_text(client, messages)
        # What was answered can be sent back as it is.
        further = [*items, *response.output, {"role": "user", "content": "Go on."}]
        assert (await client.responses.create(**GREEDY, input=further, max_output_tokens=2)).output_text


async def test_a_stream_tells_the_same(cluster: Cluster) -> None:
    async with openai_client(cluster) as client:
        asked: dict[str, Any] = {**GREEDY, "input": "What is a lease?", "max_output_tokens": 12}
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        kinds = [event.type for event in events]
        assert list(dict.fromkeys(kinds)) == [*TEXT_EVENTS, "response.incomplete"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (
            "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
        )
        last: Any = events[-1]
        assert last.response.output_text == whole.output_text
        assert last.response.usage == whole.usage.model_copy(  # the second run finds the prompt in the cache
            update={"input_tokens_details": last.response.usage.input_tokens_details}
        )
        first: Any = events[0]
        assert (first.response.status, first.response.output) == ("in_progress", [])


async def test_an_answer_that_ends_is_completed(cluster: Cluster) -> None:
    """Every token ends it: the output is empty, and there is a message all the same."""
    async with openai_client(cluster) as client:
        asked: dict[str, Any] = {"model": MODEL, "input": "a", "extra_body": {"stop_token_ids": list(range(300, 320))}}
        asked["extra_body"]["logit_bias"] = {"310": 100}
        asked["extra_body"]["skip_special_tokens"] = False
        response = await client.responses.create(**asked)
        assert (response.status, response.incomplete_details) == ("completed", None)
        kinds = [event.type async for event in await client.responses.create(**asked, stream=True)]
        assert kinds[-1] == "response.completed"
        assert set(TEXT_EVENTS) - {"response.output_text.delta"} <= set(kinds)
        async with client.responses.stream(**asked) as stream:  # the package's own reading of the events
            async for event in stream:
                assert event.type in kinds
            final = await stream.get_final_response()
        assert final.output_text == response.output_text


async def test_on_the_wire(cluster: Cluster) -> None:
    async with bare_client(cluster) as client:
        asked = {"input": "a", "max_output_tokens": 3, "stream": True, "ignore_eos": True}
        answer = await client.post("/v1/responses", json=asked, headers={"x-request-id": "mine"})
        assert answer.headers["content-type"].startswith("text/event-stream")
        frames = answer.text.removesuffix("\n\n").split("\n\n")
        for frame in frames:
            name, data = frame.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
        assert event["response"]["id"] == "resp_mine"
        assert (await client.get("/v1/responses/resp_mine")).status_code == 404


async def test_a_failure_ends_the_stream_with_an_event(cluster: Cluster) -> None:
    conductor = cluster.router.catalogue.all()[0].conductor
    async with openai_client(cluster) as client:
        asked: dict[str, Any] = {
            **GREEDY,
            "input": "a",
            "max_output_tokens": 900,
            "extra_headers": {"x-request-id": "r"},
        }
        events: list[Any] = []
        async for event in await client.responses.create(**asked, stream=True):
            events.append(event)
            if len(events) == 8:
                error = WorkerFailed("injected", retry_after_s=1.0)
                live, *_ = conductor.explanations.find("r")
                conductor.coordinator.cancel(live.request_id, conductor._clock.now(), error)
                conductor.act()
        failed = events[-1]
        assert failed.type == "response.failed"
        assert failed.response.status == "failed"
        assert (failed.response.error.code, failed.response.error.message) == ("server_error", "injected")
        assert [event.sequence_number for event in events] == list(range(len(events)))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": ["a"]}, "input[0]"),
    ({"input": [{"role": "wizard", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"truncation": "auto"}, "truncation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "no"}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_regex": "a"}, "guided_regex"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"metadata": {"a": 3}}, "metadata.a"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"metadata": {str(at): "" for at in range(17)}}, "metadata"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[param for _, param in REFUSED])
async def test_what_is_not_served_is_refused_by_name(cluster: Cluster, fields: dict[str, Any], param: str) -> None:
    async with bare_client(cluster) as client:
        answer = await client.post("/v1/responses", json={"input": "a", "max_output_tokens": 1, **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


async def test_what_asks_for_nothing_is_accepted(cluster: Cluster) -> None:
    neutral: dict[str, Any] = {
        "store": False,
        "previous_response_id": None,
        "background": False,
        "include": [],
        "truncation": "disabled",
        "reasoning": {"effort": None},
        "text": {"format": {"type": "text"}},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "metadata": {},
        "user": "me",
        "prompt_cache_key": "k",
        "service_tier": "auto",
    }
    async with bare_client(cluster) as client:
        answer = await client.post("/v1/responses", json={"input": "a", "max_output_tokens": 1, **neutral})
        assert answer.status_code == 200, answer.text
