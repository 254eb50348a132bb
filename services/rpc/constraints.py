"""Checks what an output is constrained to, before a worker compiles it. Pure.

Routers check what clients send, and workers what routers send. Owns: sizes, and which of the checks a constraint needs.
Every error is an InvalidRequest that names the field. Never: compiles anything, or knows a vocabulary.
"""

from __future__ import annotations

import functools
import re

from baton.v1 import types_pb2
from services.core.errors import InvalidRequest
from services.rpc.json_schemas import check_json_schema
from services.rpc.regexes import check_regex

MAX_GRAMMAR_BYTES = 64 << 10
MAX_GRAMMAR_RULES = 500
"""A chain of some thousand rules overflows the stack of the library that compiles it."""
MAX_CHOICES = 1024
MAX_CHOICE_BYTES = 64 << 10
"""The size of all choices together."""

_MOST_KEPT_BYTES = 2 * MAX_CHOICE_BYTES
"""No constraint that is allowed has more bytes encoded."""
_RULE = re.compile(r'[^"\s:]\s*:')
"""What comes before the colon of a rule (`name:`, `name ::=`); a key of JSON ends with a quote. It may match more."""


def check_constraint(constraint: types_pb2.Constraint) -> None:
    """Raises InvalidRequest with a field such as `constraint.json_schema`.

    It takes some milliseconds for the largest schemas, and less for all others and for those of late: many requests
    have the same, and the prompts of one call always do.
    """
    if constraint.ByteSize() > _MOST_KEPT_BYTES:
        _check(constraint)  # it is refused, for its size
    elif (fault := _fault(constraint.SerializeToString())) is not None:
        raise InvalidRequest(*fault)


@functools.lru_cache(maxsize=32)
def _fault(constraint: bytes) -> tuple[str, str] | None:
    """Returns the field and the description of what is wrong with an encoded constraint; None if nothing is."""
    try:
        _check(types_pb2.Constraint.FromString(constraint))
    except InvalidRequest as error:
        return error.field, error.description
    return None


def _check(constraint: types_pb2.Constraint) -> None:
    kind = constraint.WhichOneof("kind")
    match kind:
        case "json_schema":
            check_json_schema("constraint.json_schema", constraint.json_schema)
        case "json_object":
            pass
        case "regex":
            _filled("constraint.regex", constraint.regex)
            check_regex("constraint.regex", constraint.regex)
        case "grammar":
            _check_grammar("constraint.grammar", constraint.grammar)
        case "choices":
            _check_choices("constraint.choices", constraint.choices)
        case _:
            raise InvalidRequest("constraint", "is empty: set json_schema, json_object, regex, grammar or choices")


def _check_grammar(field: str, grammar: str) -> None:
    _filled(field, grammar)
    num_bytes = len(grammar.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(field, f"has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
    if sum(1 for _ in _RULE.finditer(grammar)) > MAX_GRAMMAR_RULES:
        raise InvalidRequest(field, f"has more than {MAX_GRAMMAR_RULES} rules")


def _check_choices(field: str, choices: types_pb2.Choices) -> None:
    texts = choices.texts
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise InvalidRequest(field, f"has {len(texts)} entries; 1 to {MAX_CHOICES} are allowed")
    seen: dict[str, int] = {}
    for index, text in enumerate(texts):
        _filled(f"{field}.texts[{index}]", text)
        if seen.setdefault(text, index) != index:
            raise InvalidRequest(f"{field}.texts[{index}]", f"is the same as texts[{seen[text]}]")
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > MAX_CHOICE_BYTES:
        raise InvalidRequest(field, f"has {num_bytes} bytes together; at most {MAX_CHOICE_BYTES} are allowed")


def _filled(field: str, text: str) -> None:
    if not text:
        raise InvalidRequest(field, "is empty")
