"""Tests matchers of drawn schemas over the default model's vocabulary: no valid document is masked out, and none that
a keyword of the schema rules out is let in."""

from __future__ import annotations

import functools
import json
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from tokenizers import Tokenizer

from services.cli.model_names import resolve_model
from services.core.errors import InvalidRequest
from services.core.process_config import DEFAULT_MODEL
from services.engine.schedule.constraint import num_words
from services.rpc.json_schemas import check_json_schema
from services.worker.grammar import Matcher, Vocabulary, compile_grammar, grammar_of
from tests.support.examples import num_examples
from tests.support.schemas import instances, schemas, written

pytestmark = pytest.mark.default_model


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(resolve_model(DEFAULT_MODEL).path / "tokenizer.json"))


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary(resolve_model(DEFAULT_MODEL).path, tokenizer().get_vocab_size(), [2])


def compiled(schema: Any) -> Matcher:
    text = json.dumps(schema)
    check_json_schema("schema", text)
    return compile_grammar(vocabulary(), grammar_of("json_schema", text))


def takes(schema: Any, text: str) -> bool:
    """Returns whether the text may be a whole answer, tokenised as the model's tokenizer does it."""
    matcher = compiled(schema)
    try:
        matcher.take(tokenizer().encode(text, add_special_tokens=False).ids)
    except InvalidRequest:
        return False
    return matcher.fill(np.zeros(num_words(vocabulary().vocab_size), np.int32))


def can_be_written(text: str) -> bool:
    """Returns whether the model's tokenizer has tokens for all bytes of a text; what it lacks it leaves out."""
    return bool(tokenizer().decode(tokenizer().encode(text, add_special_tokens=False).ids) == text)


def cases(*, short: bool) -> st.SearchStrategy[tuple[dict[str, Any], Any]]:
    return schemas(short=short).flatmap(lambda schema: st.tuples(st.just(schema), instances(schema)))


@settings(max_examples=num_examples(200), suppress_health_check=list(HealthCheck))
@given(cases(short=False))
def test_what_is_valid_is_not_masked_out(case: tuple[dict[str, Any], Any]) -> None:
    schema, instance = case
    text = written(instance, schema, schema)
    assert json.loads(text) == instance
    assume(can_be_written(text))
    assert takes(schema, text), text
    spaced = json.dumps(json.loads(text), ensure_ascii=False)  # with a blank after each colon and comma
    if not any(mark in text for mark in ("\x7f", ".", "e")):  # numbers are written in another way, too
        assert takes(schema, spaced), spaced


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["b"]}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (OBJECT, '{"b":1,"\\u0061":"x"}'),  # a declared name in disguise
        (OBJECT, '{"b":1,"a":"x"}'),
        (OBJECT, '{"b":1,"b":2}'),
        (OBJECT, '{"a":1}'),
        (OBJECT, '{"b":1}\n'),
        ({"$defs": {"d": {"type": "integer"}}, "$ref": "#/$defs/d", "minimum": 3}, "2"),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, '{"ab":"x"}'),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, '{"\\u0061b":"x"}'),
        ({"type": "object", "minProperties": 1}, "{}"),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, "[1,2]"),
        ({"type": "array", "items": {}, "minItems": 2}, "[1]"),
        ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 5}]}, "6"),
        ({"type": "string", "format": "date"}, '"2026-02-30"'),
        ({"type": "string", "format": "date-time"}, '"2026-02-03T04:05:60Z"'),
        ({"allOf": [{"type": ["string", "null"], "format": "time"}]}, '"04:05:60+01:00"'),
        ({"properties": {"const": {"type": "string", "format": "time"}}}, '{"const": "04:05:60Z"}'),
        ({"type": "string", "pattern": "b"}, '"aca"'),
        ({"type": "string", "maxLength": 2}, '"abc"'),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "1.0"),
        ({"type": "integer", "multipleOf": 3}, "10"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}]}, '["x"]'),
    ],
)
def test_each_keyword_is_kept_to(schema: Any, text: str) -> None:
    assert not takes(schema, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 5}]},
        {"type": "object", "patternProperties": {"a": {}, "b": {"type": "integer"}}},
    ],
)
def test_what_the_library_can_only_approach_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="cannot be compiled"):
        compiled(schema)


def test_alternatives_that_a_constant_tells_apart_are_served() -> None:
    parts = [
        {"type": "object", "properties": {"kind": {"const": kind}, "n": {"type": "integer"}}, "required": ["kind"]}
        for kind in ("cat", "dog")
    ]
    schema = {"oneOf": parts, "discriminator": {"propertyName": "kind"}}
    assert takes(schema, '{"kind": "dog", "n": 3}')
    assert not takes(schema, '{"kind": "cow"}')
