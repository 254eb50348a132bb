"""Tests what `baton generate` asks: its prompt in the chat template or as it is, and its constraint."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from baton.v1 import inference_pb2, types_pb2
from services.cli.generate import answer_of, make_parser, request_of
from services.core.errors import ConfigError


def constraint(*flags: str) -> types_pb2.Constraint | None:
    request = request_of(make_parser("baton generate").parse_args(["--prompt", "hi", *flags]))
    return request.constraint if request.HasField("constraint") else None


def test_each_flag_is_a_constraint(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text('{"type": "integer"}')
    assert constraint() is None
    assert constraint("--json-schema", str(file)) == types_pb2.Constraint(json_schema='{"type": "integer"}')
    assert constraint("--grammar", str(file)) == types_pb2.Constraint(grammar='{"type": "integer"}')
    assert constraint("--regex", "a+") == types_pb2.Constraint(regex="a+")
    expected = types_pb2.Constraint(choices=types_pb2.Choices(texts=["yes", "no"]))
    assert constraint("--choice", "yes", "--choice", "no") == expected


def test_an_empty_expression_is_for_the_router_to_refuse() -> None:
    assert constraint("--regex", "") == types_pb2.Constraint(regex="")


def test_a_file_that_cannot_be_read_is_told_by_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--json-schema: "):
        constraint("--json-schema", str(tmp_path / "none"))


def test_two_constraints_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="--choice: not allowed with argument --regex"):
        constraint("--regex", "a", "--choice", "b")


def asked(*flags: str, has_template: bool = True) -> inference_pb2.GenerateRequest:
    """Returns what a router is asked that serves two models, of which the second has no chat template."""
    arguments = make_parser("baton generate").parse_args(["--prompt", "hi", *flags])
    request = request_of(arguments)
    models = [
        inference_pb2.Model(id="own", has_chat_template=has_template),
        inference_pb2.Model(id="other", has_chat_template=False),
    ]
    answer_of(client := FakeClient(models), request, arguments)
    return client.asked


class FakeClient:
    """Answers every request with one word."""

    def __init__(self, models: list[inference_pb2.Model]) -> None:
        self.models = models
        self.asked: inference_pb2.GenerateRequest

    def list_models(self, *, timeout_s: float | None = None) -> list[inference_pb2.Model]:
        return self.models

    @contextlib.contextmanager
    def generate_stream(self, request: inference_pb2.GenerateRequest, *, timeout_s: float | None = None):
        self.asked = request
        completion = inference_pb2.Completion(finish_reason=types_pb2.FINISH_REASON_STOP)
        for part in (completion.usage, completion.timings, completion.workers):
            part.SetInParent()
        yield iter(
            [
                inference_pb2.GenerateStreamResponse(chunk=inference_pb2.Chunk(text="word")),
                inference_pb2.GenerateStreamResponse(completion=completion),
            ]
        )


def test_a_prompt_is_a_users_message_where_the_model_takes_messages(capsys: pytest.CaptureFixture[str]) -> None:
    (message,) = asked().messages.messages
    assert (message.role, message.content) == ("user", "hi")
    assert asked("--raw").text == "hi"
    assert asked(has_template=False).text == "hi"
    assert asked("--model", "other").text == "hi"
    assert asked("--model", "own").messages.messages
    assert asked("--chat", has_template=False).messages.messages, "the router says that there is no template"
    assert [each.role for each in asked("--system", "be brief").messages.messages] == ["system", "user"]
    assert capsys.readouterr().out.startswith("word\n")
    with pytest.raises(ConfigError, match="--system: not allowed with --raw"):
        asked("--system", "be brief", "--raw")


def test_an_answer_ends_at_256_tokens_unless_told() -> None:
    assert asked().stopping.max_tokens == 256
    assert asked("--max-tokens", "3").stopping.max_tokens == 3


@pytest.mark.parametrize(("before", "printed"), [(1, "word\n"), (0, "")])
def test_what_ends_an_answer_early_is_told_in_a_line_of_its_own(
    before: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(FakeClient):
        @contextlib.contextmanager
        def generate_stream(self, request: inference_pb2.GenerateRequest, *, timeout_s: float | None = None):
            def events():
                for _ in range(before):
                    yield inference_pb2.GenerateStreamResponse(chunk=inference_pb2.Chunk(text="word"))
                raise KeyboardInterrupt

            yield events()

    arguments = make_parser("baton generate").parse_args(["--prompt", "hi"])
    with pytest.raises(KeyboardInterrupt):
        answer_of(Failing([]), request_of(arguments), arguments)
    assert capsys.readouterr().out == printed
