"""Tests that a response's items and its events tell the same, whatever the model makes and in whatever pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import inference_pb2
from services.core.errors import InvalidRequest, WorkerFailed
from services.router.front.http.body import Body
from services.router.front.http.reply import Reply, http_error
from services.router.front.http.responses.input import read_input
from services.router.front.http.responses.output import OutputEvent, ResponseOutput
from services.router.front.http.responses.writer import ResponseStreamWriter

WORDS = st.text("ab\n🙂", min_size=1, max_size=4)


def call(index: int, arguments: str = "", name: str = "") -> inference_pb2.Chunk:
    part = inference_pb2.ToolCallDelta(index=index, arguments=arguments, name=name, id=name and f"call_{index}")
    return inference_pb2.Chunk(tool_calls=[part], token_ids=[1])


def text(words: str) -> inference_pb2.Chunk:
    return inference_pb2.Chunk(text=words, token_ids=[1])


def thought(words: str) -> inference_pb2.Chunk:
    return inference_pb2.Chunk(reasoning=words, token_ids=[1])


ANSWERS = st.tuples(
    st.lists(WORDS.map(thought), max_size=3),
    st.lists(WORDS.map(text), max_size=3),
    st.integers(0, 2).flatmap(
        lambda count: st.tuples(*(st.lists(WORDS, max_size=3) for _ in range(count))).map(
            lambda calls: [
                chunk
                for index, parts in enumerate(calls)
                for chunk in (call(index, name="f"), *(call(index, part) for part in parts))
            ]
        )
    ),
).map(lambda parts: [chunk for part in parts for chunk in part])


class Reader:
    """Rebuilds the items from the events, as a client does, and checks their order."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = ""

    def read(self, events: list[OutputEvent]) -> None:
        for kind, fields in events:
            getattr(self, kind.replace(".", "_"))(fields)

    def output_item_added(self, fields: dict[str, Any]) -> None:
        assert self._open is None
        assert fields["output_index"] == len(self.items)
        self._open, self._text = fields["item"], ""
        assert self._open["status"] == "in_progress"

    def content_part_added(self, fields: dict[str, Any]) -> None:
        assert self._open is not None
        assert self._open["type"] != "function_call"
        assert fields["part"]["text"] == ""

    def _delta(self, fields: dict[str, Any]) -> None:
        assert self._open is not None
        assert (fields["item_id"], fields["output_index"]) == (self._open["id"], len(self.items))
        assert fields["delta"]
        self._text += fields["delta"]

    output_text_delta = reasoning_text_delta = function_call_arguments_delta = _delta

    def output_text_done(self, fields: dict[str, Any]) -> None:
        assert fields["text"] == self._text

    reasoning_text_done = output_text_done

    def function_call_arguments_done(self, fields: dict[str, Any]) -> None:
        assert self._open is not None
        assert (fields["arguments"], fields["name"]) == (self._text, self._open["name"])

    def content_part_done(self, fields: dict[str, Any]) -> None:
        assert fields["part"]["text"] == self._text

    def output_item_done(self, fields: dict[str, Any]) -> None:
        assert self._open is not None
        item = fields["item"]
        assert item["id"] == self._open["id"]
        assert item["type"] == self._open["type"]
        self.items.append(item)
        self._open = None


@given(ANSWERS, st.booleans())
def test_events_tell_what_the_items_are(chunks: list[inference_pb2.Chunk], is_cut: bool) -> None:
    output, reader = ResponseOutput("r"), Reader()
    for chunk in chunks:
        reader.read(output.add(chunk))
    reader.read(output.end(is_cut=is_cut))
    assert reader.items == output.items
    assert len({item["id"] for item in output.items}) == len(output.items)
    statuses = [item["status"] for item in output.items]
    assert statuses == ["completed"] * (len(statuses) - 1) + ["incomplete" if is_cut else "completed"]
    found = {kind: [item for item in output.items if item["type"] == kind] for kind in ("reasoning", "message")}
    for kind, own in (("reasoning", "reasoning"), ("message", "text")):
        wanted = "".join(getattr(chunk, own) for chunk in chunks)
        assert "".join(item["content"][0]["text"] for item in found[kind]) == wanted
        assert len(found[kind]) == bool(wanted) or not chunks
    calls = [item for item in output.items if item["type"] == "function_call"]
    for index, item in enumerate(calls):
        parts = [part.arguments for chunk in chunks for part in chunk.tool_calls if part.index == index]
        assert (item["arguments"], item["name"], item["call_id"]) == ("".join(parts), "f", f"call_{index}")


def test_one_chunk_may_have_all_of_it() -> None:
    output = ResponseOutput("r")
    chunk = inference_pb2.Chunk(reasoning="a", text="b", tool_calls=[*call(0, "{", "f").tool_calls])
    output.add(chunk)
    output.end()
    assert [item["type"] for item in output.items] == ["reasoning", "message", "function_call"]


async def test_a_stream_that_fails_after_comments_alone_begins_as_others_do() -> None:
    """OpenAI's package takes no event before `response.created`."""
    sent = list[bytes]()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    reply = Reply(send)
    ResponseStreamWriter({}, "r", "m", reply)
    reply.comment("waiting, 1st of 1")
    await reply.failed(http_error(WorkerFailed("gone")))
    told = [
        json.loads(line.removeprefix("data: ")) for line in b"".join(sent).decode().splitlines() if "data: " in line
    ]
    assert [(event["type"], event["sequence_number"]) for event in told] == [
        ("response.created", 0),
        ("response.in_progress", 1),
        ("response.failed", 2),
    ]


def read(*items: Any, **fields: Any) -> list[inference_pb2.ChatMessage]:
    chat = inference_pb2.ChatMessages()
    read_input(Body({"input": list(items), **fields}), chat)
    return list(chat.messages)


def test_what_the_assistant_said_in_several_items_is_one_message() -> None:
    thoughts = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    first = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    second = {**first, "call_id": "2"}
    result = {"type": "function_call_output", "call_id": "1", "output": "3"}
    said = {"role": "assistant", "content": "I look."}
    messages = read({"role": "user", "content": "a"}, thoughts, said, first, second, result, said, said, first)
    assert [(each.role, each.content, len(each.tool_calls)) for each in messages] == [
        ("user", "a", 0),
        ("assistant", "I look.", 2),
        ("tool", "3", 0),
        ("assistant", "I look.", 0),
        ("assistant", "I look.", 1),
    ]
    assert messages[1].reasoning == "hm"
    assert [each.id for each in messages[1].tool_calls] == ["1", "2"]
    assert messages[2].tool_call_id == "1"


def test_a_summary_is_not_what_was_thought() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}
    assert [each.role for each in read(summary, {"role": "user", "content": "a"})] == ["user"]


@pytest.mark.parametrize("name", ["call_id", "name", "arguments"])
def test_a_call_without_a_part_is_refused(name: str) -> None:
    whole = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    with pytest.raises(InvalidRequest) as refused:
        read({key: value for key, value in whole.items() if key != name})
    assert refused.value.field == f"input[0].{name}"
