"""Checks what an output may be constrained to: each bound, and each refusal by its name."""

from __future__ import annotations

import pytest

from baton.v1 import types_pb2
from services.core.errors import InvalidRequest
from services.rpc.constraints import (
    MAX_CHOICE_BYTES,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_GRAMMAR_RULES,
    check_constraint,
)
from services.rpc.regexes import MAX_REGEX_BYTES, MAX_REGEX_LEVELS, check_regex


def _choices(*texts: str) -> types_pb2.Constraint:
    return types_pb2.Constraint(choices=types_pb2.Choices(texts=texts))


def _rules(num: int) -> str:
    return "start: r0\n" + "\n".join(f'r{index}: "x" r{index + 1}' for index in range(num - 2)) + f'\nr{num - 2}: "a"'


@pytest.mark.parametrize(
    "constraint",
    [
        types_pb2.Constraint(json_schema='{"type": "integer"}'),
        types_pb2.Constraint(json_object=types_pb2.AnyJsonObject()),
        types_pb2.Constraint(regex="[0-9]{4}-[0-9]{2}"),
        types_pb2.Constraint(grammar='root ::= "yes" | "no"'),
        types_pb2.Constraint(grammar=_rules(MAX_GRAMMAR_RULES)),
        _choices("yes", "no"),
        _choices(*map(str, range(MAX_CHOICES))),
    ],
)
def test_what_is_served_is_accepted(constraint: types_pb2.Constraint) -> None:
    check_constraint(constraint)


@pytest.mark.parametrize(
    ("constraint", "field", "words"),
    [
        (types_pb2.Constraint(), "constraint", "is empty"),
        (types_pb2.Constraint(json_schema=""), "constraint.json_schema", "is not JSON"),
        (types_pb2.Constraint(regex=""), "constraint.regex", "is empty"),
        (types_pb2.Constraint(regex="a" * (MAX_REGEX_BYTES + 1)), "constraint.regex", str(MAX_REGEX_BYTES)),
        (types_pb2.Constraint(grammar=""), "constraint.grammar", "is empty"),
        (types_pb2.Constraint(grammar="é" * (MAX_GRAMMAR_BYTES // 2 + 1)), "constraint.grammar", "bytes"),
        (types_pb2.Constraint(grammar=_rules(MAX_GRAMMAR_RULES + 1)), "constraint.grammar", "500 rules"),
        (types_pb2.Constraint(grammar="a ::= b\n" * (MAX_GRAMMAR_RULES + 1)), "constraint.grammar", "500 rules"),
        (types_pb2.Constraint(grammar="a : b\n" * (MAX_GRAMMAR_RULES + 1)), "constraint.grammar", "500 rules"),
        (types_pb2.Constraint(choices=types_pb2.Choices()), "constraint.choices", "0 entries"),
        (_choices(*map(str, range(MAX_CHOICES + 1))), "constraint.choices", "1025 entries"),
        (_choices("a", ""), "constraint.choices.texts[1]", "is empty"),
        (_choices("a", "b", "a"), "constraint.choices.texts[2]", "the same as texts[0]"),
        (_choices("a" * MAX_CHOICE_BYTES, "b"), "constraint.choices", "together"),
    ],
)
def test_what_is_not_served_is_refused_by_name(constraint: types_pb2.Constraint, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_constraint(constraint)
    assert refused.value.field == field
    assert words in refused.value.description


@pytest.mark.parametrize(
    "regex",
    [
        "a|b",
        r"\d+(\.\d+)?",
        r"[\b\1]",
        r"\\1\\b",
        "(?:a)(?P<name>b)(?i)c",
        "[(?=]",
        "(" * MAX_REGEX_LEVELS + "a" + ")" * MAX_REGEX_LEVELS,
        "(a)" * 1000,
        "a{1,99999}",
    ],
)
def test_regular_expressions_that_are_served(regex: str) -> None:
    check_regex("regex", regex)


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        ("a(?=b)", "look-ahead"),
        ("a(?!b)", "look-ahead"),
        ("(?<=a)b", "look-behind"),
        ("(?<!a)b", "look-behind"),
        (r"(a)\1", r"\1, a back reference"),
        (r"(?<n>a)\k<n>", "a back reference"),
        (r"\bword", "look-around"),
        (r"[a]\B", "look-around"),
        ("(" * (MAX_REGEX_LEVELS + 1), "levels"),
        ("[" * (MAX_REGEX_LEVELS + 1), "levels"),
        ("a{100000}", "repeats"),
        ("a{3,100000}", "repeats"),
        ("a{1,99999999999999999999}", "repeats"),
    ],
)
def test_regular_expressions_that_are_refused(regex: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^regex: ") as refused:
        check_regex("regex", regex)
    assert words in refused.value.description
