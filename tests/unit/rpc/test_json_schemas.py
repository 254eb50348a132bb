"""Which JSON Schemas outputs can be constrained to: each keyword, and each refusal with the keyword's place."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from services.core.errors import InvalidRequest
from services.rpc.json_schemas import (
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_LEVELS,
    MAX_SCHEMAS,
    MAX_SHOWN_CHARS,
    MAX_VALUES,
    check_json_schema,
)

INT = {"type": "integer"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize("number", [2**53 + 1, -(2**63), 2**64, 1e300, 123456789.12345679])
def test_a_constant_that_would_be_rounded_is_refused(number: float) -> None:
    for value in (number, [number], {"a": number}):
        for schema, place in (({"const": value}, "/const"), ({"items": {"enum": [1, value]}}, "/items/enum")):
            with pytest.raises(InvalidRequest, match=f"{place} has the number"):
                check_json_schema("f", json.dumps(schema))


@pytest.mark.parametrize("number", [2**53, -(2**53), 0.1, 123456.789, 1.5e-7, True, -1])
def test_a_constant_that_outputs_have_as_it_is(number: float) -> None:
    check_json_schema("f", json.dumps({"const": number, "enum": [number], "default": 2**70}))


@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("number", [2**53 + 1, 2**63 - 3, -(2**63) + 1])
def test_a_bound_that_would_be_rounded_is_refused(keyword: str, number: int) -> None:
    with pytest.raises(InvalidRequest, match="would be rounded"):
        check_json_schema("f", json.dumps({keyword: number}))


def _nested(levels: int) -> Any:
    schema: Any = INT
    for _ in range(levels - 1):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/a", **INT},
        {"$schema": DRAFT_7, "type": "array", "items": [INT, INT], "additionalItems": False},
        {"type": ["integer", "null"], "minimum": -5, "exclusiveMaximum": 1.5, "multipleOf": 0.25},
        {"minimum": -(2**53) + 1, "maximum": 2**63 - 1},
        {"type": "string", "minLength": 1, "maxLength": 100_000, "pattern": "^[a-z]+$"},
        {
            "type": "string",
            "format": "date-time",
            "title": "When",
            "description": "é\n",
            "default": "x",
            "examples": [],
        },
        {"type": "array", "prefixItems": [INT, True], "items": False, "minItems": 1, "maxItems": 3},
        {
            "type": "object",
            "properties": {"not": INT, "$ref": {"type": "string"}, "a/b~c": {}},
            "patternProperties": {"^x-": INT},
            "required": ["not"],
            "additionalProperties": False,
        },
        {"type": "object", "minProperties": 1, "maxProperties": 1},
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 2},
        {"enum": [1, "a", None, {"not": 1}], "x-note": {"not": 1}, "contentMediaType": "text/html"},
        {"anyOf": [{"const": {"$ref": "nowhere"}}, INT], "oneOf": [INT], "allOf": [{}]},
        {"$defs": {"a/b c": INT}, "$ref": "#/$defs/a~1b%20c"},
        {"definitions": {"a": INT}, "items": {"$ref": "#/definitions/a"}},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {"prefixItems": [INT, {"$ref": "#/prefixItems/0"}]},
        _nested(MAX_SCHEMA_LEVELS),
        {"properties": {str(index): {} for index in range(MAX_SCHEMAS - 1)}},
        {"enum": list(range(MAX_VALUES - 10))},
    ],
)
def test_what_is_served_is_accepted(schema: Any) -> None:
    check_json_schema("schema", json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (False, "is false"),
        (3, "is no schema"),
        ([INT], "is no schema"),
        ({"properties": {"a": 3}}, "/properties/a is no schema"),
        ({"not": INT}, "/not is a keyword that is not served"),
        ({"properties": {"a/b": {"items": {"if": {}}}}}, "/properties/a~1b/items/if is a keyword"),
        ({"$defs": {"unused": {"uniqueItems": True}}}, "/$defs/unused/uniqueItems is a keyword"),
        ({"foo": {"contains": {}}, "$ref": "#/foo"}, "/foo is a keyword"),
        ({"type": "string", "maxlength": 3}, "/maxlength is a keyword"),
        ({"nullable": True}, "/nullable is a keyword"),
        ({"x-guidance": {"lenient": True}}, "/x-guidance is a keyword"),
        ({"properties": {"a": {"$schema": DRAFT_7}}}, "/properties/a/$schema is only served at the top"),
        ({"items": {"$id": "a"}}, "/items/$id is only served at the top"),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, "/$schema is "),
        ({"$schema": 3}, "/$schema is 3"),
        ({"$schema": DRAFT_7, "prefixItems": [INT]}, "/prefixItems is a keyword of draft 2020-12"),
        ({"items": [INT]}, "/items is a list"),
        ({"additionalItems": False}, "/additionalItems is no keyword"),
        ({"$ref": "https://example.com/a"}, "it must point into this schema"),
        ({"$ref": "#anchor"}, "it must point into this schema"),
        ({"$ref": 3}, "/$ref is 3"),
        ({"$ref": "#/$defs/a"}, "nothing is there"),
        ({"prefixItems": [INT, {"$ref": "#/prefixItems/00000000000000000000002"}]}, "nothing is there"),
        ({"$ref": "#"}, "leads back to itself"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [INT, {"$ref": "#/$defs/a"}]}}}, "leads back"),
        ({"$ref": "#/const", "const": "text"}, "is no schema"),
        ({"type": "float"}, "/type is "),
        ({"type": []}, "/type is []"),
        ({"type": ["integer", 3]}, "/type is "),
        ({"enum": []}, "/enum must be a list, and not empty"),
        ({"anyOf": []}, "/anyOf must be a list"),
        ({"properties": []}, "/properties must be an object"),
        ({"required": "a"}, "/required must be a list of names"),
        ({"required": [["a"]]}, "/required must be a list of names"),
        ({"minItems": -1}, "/minItems is -1"),
        ({"minItems": 2.0}, "/minItems is 2.0"),
        ({"minItems": True}, "/minItems is true"),
        ({"maxLength": 100_001}, "/maxLength is 100001"),
        ({"properties": {"a": {}}, "minProperties": 1}, "/minProperties is only served where all"),
        ({"type": "object", "minProperties": 2}, "/minProperties is 2"),
        ({"minimum": "3"}, '/minimum is "3"'),
        ({"exclusiveMinimum": True}, "/exclusiveMinimum is true"),
        ({"minimum": 2**63}, "/minimum is "),
        ({"minimum": 1e-16}, "/minimum is 1e-16"),
        ({"multipleOf": 0}, "/multipleOf is 0"),
        ({"multipleOf": -2}, "/multipleOf is -2"),
        ({"multipleOf": 1025}, "/multipleOf is 1025"),
        ({"multipleOf": 102.5}, "/multipleOf is 102.5"),
        ({"allOf": [{"multipleOf": 97}, {"multipleOf": 89}]}, "common multiple"),
        ({"format": "binary"}, '/format is "binary"'),
        ({"pattern": 3}, "/pattern must be a string"),
        ({"pattern": "(?=a)b"}, "/pattern has (?=, a look-ahead"),
        ({"patternProperties": {"^\\b": {}}}, "/patternProperties/^\\b has \\b"),
        ({"patternProperties": {str(index): {} for index in range(17)}}, "/patternProperties has 17 entries"),
        ({"prefixItems": [{"pattern": "a" * 9000}, {"pattern": "b" * 9000}]}, "longer than 16384 characters"),
        ({"const": "\x00"}, "has the character \\x00"),
        ({"properties": {"\ud800": {}}}, "has the character \\ud800"),
        (_nested(MAX_SCHEMA_LEVELS + 1), "/items is below 32 levels"),
        ({"properties": {str(index): {} for index in range(MAX_SCHEMAS)}}, "has more than 1024 schemas"),
        ({"enum": list(range(MAX_VALUES))}, "has more than 8192 values"),
    ],
)
def test_what_is_not_served_is_refused_with_its_place(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_json_schema("schema", json.dumps(schema))
    assert refused.value.field == "schema"
    assert words in refused.value.description
    assert len(refused.value.description) < 2 * MAX_SHOWN_CHARS + 100
    refused.value.description.encode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 60_000, "is not JSON"),
        ('{"minimum": NaN}', "NaN is no number"),
        ('{"minimum": 1e999}', "a number that is out of range"),
        (f'{{"minimum": {"9" * 5000}}}', "is not JSON"),
        ('{"const": ' + "[" * 200 + "]" * 200 + "}", "levels of lists"),
        ('{"title": "' + "é" * (MAX_SCHEMA_BYTES // 2) + '"}', "bytes; at most 65536"),
    ],
)
def test_texts_that_are_no_schema(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_json_schema("schema", text)
    assert words in refused.value.description


@pytest.mark.clock
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {str(index): {"pattern": "a" * 40} for index in range(MAX_SCHEMAS - 1)}},
        {"$defs": {str(index): {"$ref": f"#/$defs/{index + 1}"} for index in range(500)} | {"500": {}}},
        {"enum": [[] for _ in range(MAX_VALUES - 10)]},
        {"pattern": "(" * 16_000},
        {"pattern": "[(?" * 5000},
        {"pattern": "{" + "1" * 16_000},
    ],
)
def test_the_check_holds_the_event_loop_for_milliseconds(schema: Any) -> None:
    text, best_s = json.dumps(schema), 1.0
    for _ in range(5):
        started_s = time.process_time()
        with contextlib.suppress(InvalidRequest):
            check_json_schema("schema", text)
        best_s = min(best_s, time.process_time() - started_s)
    assert best_s < 0.02
