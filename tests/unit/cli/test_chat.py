"""Tests the commands of `baton chat`, its first line, and the line that it prints after an answer."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import cast

import grpc
import pytest

from baton.v1 import inference_pb2, types_pb2
from baton_client import CallFailed, Client
from services.cli.chat import Conversation, dimmed, figures, greeting, make_parser


def completion(output_tokens: int, prefill: str, decode: str, retries: int = 0, **timings) -> inference_pb2.Completion:
    return inference_pb2.Completion(
        usage=inference_pb2.Usage(output_tokens=output_tokens),
        workers=inference_pb2.Workers(prefill=prefill, decode=decode, retries=retries),
        timings=types_pb2.PhaseTimings(**timings),
    )


def test_a_split_answer() -> None:
    split = completion(
        *(41, "prefill-0", "decode-0"),
        ttft_ms=210.0,
        total_ms=1210.0,
        transfer_bytes=3 << 20,
        transfer_exposed_ms=1.25,
        transport=types_pb2.TRANSPORT_GRPC,
    )
    # Forty tokens in the second after the first.
    expected = "41 tokens | 40.0 tokens/s | first token 210 ms | prefill-0 -> decode-0: 3.0 MiB by grpc, 1.2 ms exposed"
    assert figures(split) == expected


def test_an_unsplit_answer_and_one_that_was_placed_again() -> None:
    unsplit = completion(2, "decode-0", "decode-0", ttft_ms=100.0, total_ms=150.0)
    assert figures(unsplit) == "2 tokens | 20.0 tokens/s | first token 100 ms | decode-0, not split"
    again = completion(1, "prefill-0", "", retries=2, ttft_ms=100.0, total_ms=100.0)
    assert figures(again) == "1 token | first token 100 ms | prefill-0, not split | placed again 2 times"


def test_nothing_is_made_up() -> None:
    assert figures(completion(5, "a", "b")) == "5 tokens | a -> b: KV"


def test_names_have_bounds() -> None:
    assert len(figures(completion(5, "a" * 1000, "b" * 1000))) < 150


def test_the_line_is_dim_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert dimmed("x") == "\x1b[2mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert dimmed("x") == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert dimmed("x") == "x"


def conversation(*flags: str) -> Conversation:
    return Conversation(cast(Client, None), make_parser("baton chat").parse_args(flags))


def test_commands_change_what_is_asked_and_an_unknown_one_is_told() -> None:
    chat = conversation("--system", "be brief")
    assert [line.split()[0] for line in chat.obey("/help").splitlines()] == [
        *("/help", "/clear", "/system", "/set", "/exit"),
    ]
    assert chat.obey("/hlep") == "/hlep is no command (did you mean /help?); /help lists them"
    assert chat.obey("/zzz") == "/zzz is no command; /help lists them"
    assert [each.role for each in chat.messages] == ["system"]
    assert "forgotten" in chat.obey("/system speak French")
    assert [each.content for each in chat.messages] == ["speak French"]
    assert "forgotten" in chat.obey("/system")
    assert not chat.messages


def test_clear_forgets_what_was_said_but_not_the_system_message() -> None:
    chat = conversation("--system", "be brief")
    chat.messages.append(inference_pb2.ChatMessage(role="user", content="hello"))
    assert "forgotten" in chat.obey("/clear")
    assert [each.content for each in chat.messages] == ["be brief"]


def test_settings_are_those_of_the_flags() -> None:
    chat = conversation("--max-tokens", "5")
    assert "max_tokens          5" in chat.obey("/set").splitlines()
    assert "temperature         0.2" in chat.obey("/set temperature 0.2").splitlines()
    assert "temperature         0.7" in chat.obey("/set temperature").splitlines(), "the default is back"
    assert "top_p               0.9" in chat.obey("/set top-p 0.9").splitlines()
    assert chat.obey("/set seed x") == "argument --seed: invalid int value: 'x'"
    assert chat.obey("/set temprature 1").startswith("temprature cannot be set (did you mean temperature?); there are ")


def test_the_first_line_says_which_model_and_how_to_leave() -> None:
    models = [inference_pb2.Model(id="own"), inference_pb2.Model(id="other")]
    assert greeting(models, None).startswith("own  /help lists commands, /exit or Ctrl-D leaves")
    assert greeting(models, "other").startswith("other  ")


class FailingClient:
    """Answers with one word, and then fails."""

    @contextlib.contextmanager
    def generate_stream(self, request: inference_pb2.GenerateRequest, *, timeout_s: float | None = None):
        yield self._events()

    def _events(self) -> Iterator[inference_pb2.GenerateStreamResponse]:
        yield inference_pb2.GenerateStreamResponse(chunk=inference_pb2.Chunk(text="Because"))
        raise CallFailed(grpc.StatusCode.INTERNAL, "the worker failed")


def said(chat: Conversation, monkeypatch: pytest.MonkeyPatch, typed: bytes) -> list[tuple[str, str]]:
    """Returns what is in the conversation when this was typed."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
    chat.run()
    return [(each.role, each.content) for each in chat.messages]


def test_an_answer_that_fails_stays_and_the_error_has_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Conversation(cast(Client, FailingClient()), make_parser("baton chat").parse_args([]))
    assert said(chat, monkeypatch, b"Why?\n") == [("user", "Why?"), ("assistant", "Because")]
    captured = capsys.readouterr()
    assert captured.out == "> Because\n> \n"
    assert captured.err.endswith("the worker failed\n")


def test_a_line_that_is_no_text_is_told_and_the_conversation_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(conversation(), monkeypatch, b"\xff\n/help\n") == []
    assert "not UTF-8" in capsys.readouterr().out
