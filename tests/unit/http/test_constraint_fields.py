"""Each spelling of a constraint becomes one, and what is wrong with it is told by the client's own field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton.v1 import types_pb2
from services.core.errors import InvalidRequest
from services.router.front.http import chat, completions
from services.router.front.http.answers import HttpCall
from services.router.front.http.body import Body
from services.router.front.http.generation import with_client_names
from services.router.text.token_texts import TokenTexts
from services.rpc.constraints import check_constraint
from tests.support.text_model import byte_tokenizer

TEXTS = TokenTexts(byte_tokenizer())
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}, "a": {}}}
TEXT = '{"type":"object","properties":{"é":{"type":"integer"},"a":{}}}'
Read = Callable[..., HttpCall]


def completion(**fields: Any) -> HttpCall:
    return completions.read_call(Body({"prompt": "hi", **fields}), TEXTS)


def conversation(**fields: Any) -> HttpCall:
    return chat.read_call(Body({"messages": [{"role": "user", "content": "hi"}], **fields}), TEXTS)


def described(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", **fields}}}


both = pytest.mark.parametrize("read", [completion, conversation])


@both
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, types_pb2.Constraint(regex="a")),
        (
            {"response_format": {"type": "json_object"}},
            types_pb2.Constraint(json_object=types_pb2.AnyJsonObject()),
        ),
        (described(schema=SCHEMA, strict=True, description="d"), types_pb2.Constraint(json_schema=TEXT)),
        (described(schema=SCHEMA, strict=False), types_pb2.Constraint(json_schema=TEXT)),
        (described(schema=True), types_pb2.Constraint(json_schema="true")),
        ({"guided_json": SCHEMA}, types_pb2.Constraint(json_schema=TEXT)),
        ({"guided_json": " {}"}, types_pb2.Constraint(json_schema=" {}")),
        ({"guided_choice": ["a", "b"]}, types_pb2.Constraint(choices=types_pb2.Choices(texts=["a", "b"]))),
        ({"guided_grammar": "root ::= x"}, types_pb2.Constraint(grammar="root ::= x")),
        ({"structured_outputs": {"json": SCHEMA}}, types_pb2.Constraint(json_schema=TEXT)),
        ({"structured_outputs": {"regex": "a", "json": None, "json_object": False}}, types_pb2.Constraint(regex="a")),
        (
            {"structured_outputs": {"choice": ["a"], "disable_any_whitespace": False}},
            types_pb2.Constraint(choices=types_pb2.Choices(texts=["a"])),
        ),
        ({"structured_outputs": {"grammar": "g"}}, types_pb2.Constraint(grammar="g")),
        # All that vLLM's own record has, most of it null.
        ({"structured_outputs": {"regex": "a", "structural_tag": None}}, types_pb2.Constraint(regex="a")),
        (described(schema=True, other=None), types_pb2.Constraint(json_schema="true")),
        (
            {"structured_outputs": {"json_object": True}},
            types_pb2.Constraint(json_object=types_pb2.AnyJsonObject()),
        ),
    ],
)
def test_each_spelling_is_a_constraint(read: Read, fields: Any, expected: types_pb2.Constraint | None) -> None:
    (prompt,) = read(**fields).prompts
    assert (prompt.request.constraint if prompt.request.HasField("constraint") else None) == expected


@both
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {}}, "response_format.type", "is missing"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "'structural_tag'"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is missing"),
        (described(schema="{}"), "response_format.json_schema.schema", "must be an object"),
        (described(schema={}, strict=1), "response_format.json_schema.strict", "true or false"),
        (described(schema={}, name=[]), "response_format.json_schema.name", "must be a string"),
        (described(schema={}, other=1), "response_format.json_schema.other", "not supported"),
        (described(schema={}) | {"guided_regex": "a"}, "guided_regex", "together with response_format"),
        ({"guided_json": {}, "guided_choice": ["a"]}, "guided_choice", "together with guided_json"),
        ({"guided_json": 3, "structured_outputs": {"regex": "a"}}, "guided_json", "together with structured_outputs"),
        ({"guided_json": "\ud800"}, "guided_json", "surrogate"),
        ({"guided_json": {"const": "\ud800"}}, "guided_json", "has the character"),
        ({"guided_json": {"enum": list(range(9000))}}, "guided_json", "values"),
        ({"guided_json": {"title": "a" * 70_000}}, "guided_json", "characters"),
        ({"guided_regex": 3}, "guided_regex", "must be a string"),
        ({"guided_choice": "a"}, "guided_choice", "must be a list"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]", "must be a string"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice", "at most 1024"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "not supported"),
        ({"guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern", "not supported"),
        ({"structured_outputs": {}}, "structured_outputs", "has none"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "has json and regex"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag", "not supported"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "not supported",
        ),
        # What gRPC's check finds is told by the names of the body.
        (described(schema={"not": {}}), "response_format.json_schema.schema", "/not is a keyword"),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        ({"guided_json": [1]}, "guided_json", "is no schema"),
        ({"guided_regex": "(?=a)"}, "guided_regex", "look-ahead"),
        ({"guided_choice": []}, "guided_choice", "0 entries"),
        ({"guided_choice": ["a", "a"]}, "guided_choice[1]", "the same"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]", "is empty"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", "is empty"),
    ],
)
def test_what_is_wrong_is_named_as_the_client_wrote_it(read: Read, fields: Any, param: str, words: str) -> None:
    def submit() -> None:
        (prompt,) = read(**fields).prompts
        with with_client_names(prompt.params, prompt.rename):
            check_constraint(prompt.request.constraint)

    with pytest.raises(InvalidRequest) as refused:
        submit()
    assert refused.value.field == param
    assert words in refused.value.description


def test_all_prompts_of_a_call_have_the_constraint() -> None:
    call = completions.read_call(Body({"prompt": ["a", "b"], "guided_regex": "x"}), TEXTS)
    assert [prompt.request.constraint.regex for prompt in call.prompts] == ["x", "x"]
    assert [prompt.params["constraint.regex"] for prompt in call.prompts] == ["guided_regex"] * 2
    assert [prompt.params["text"] for prompt in call.prompts] == ["prompt[0]", "prompt[1]"]
