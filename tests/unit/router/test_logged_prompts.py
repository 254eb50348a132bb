"""Tests what `--log-prompts` writes of a prompt: enough to recognise it, never all of something huge."""

from __future__ import annotations

import pytest

from baton.v1 import inference_pb2
from services.router.front.intake import MAX_LOGGED_CHARS, logged_prompt


def chat(*contents: str) -> inference_pb2.GenerateRequest:
    messages = [inference_pb2.ChatMessage(role="user", content=content) for content in contents]
    return inference_pb2.GenerateRequest(messages=inference_pb2.ChatMessages(messages=messages))


@pytest.mark.parametrize(
    ("request_", "end"),
    [
        (inference_pb2.GenerateRequest(text="x" * 1_000_000), f" and {1_000_000 - MAX_LOGGED_CHARS} characters more"),
        (inference_pb2.GenerateRequest(text="\x00" * 1_000_000), " characters more"),
        (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=range(100_000))), " and 99488 ids more"),
        (chat("x" * 1_000_000), " characters more"),
        (chat(*["x"] * 1024), " characters more"),
        (chat(*[""] * 1024), " characters more"),
    ],
    ids=["text", "control characters", "token ids", "a message", "many messages", "empty messages"],
)
def test_a_huge_prompt_takes_one_short_line(request_: inference_pb2.GenerateRequest, end: str) -> None:
    line = logged_prompt(request_)
    assert len(line) < 8 * MAX_LOGGED_CHARS
    assert "\n" not in line
    assert line.endswith(end)


def test_a_short_prompt_is_there_as_it_is() -> None:
    assert logged_prompt(inference_pb2.GenerateRequest(text="naïve\n")) == '"naïve\\n"'
    assert logged_prompt(chat("hi")) == '[{"role": "user", "content": "hi"}]'
    assert logged_prompt(inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2]))) == "[1, 2]"
