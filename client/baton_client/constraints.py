"""Makes what an output is constrained to: `request.constraint.CopyFrom(json_schema(...))`.

The server checks it: what is too large, or not served, is an InvalidArgument that names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from baton.v1.types_pb2 import AnyJsonObject, Choices, Constraint


def json_schema(schema: Mapping[str, Any] | str | bool) -> Constraint:
    """Demands a JSON document that is valid under the JSON Schema, which may be text already.

    With pydantic: `json_schema(Model.model_json_schema())`, and then `Model.model_validate_json(text)`.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Constraint(json_schema=text)


def json_object() -> Constraint:
    """Demands a JSON object, whatever is in it."""
    return Constraint(json_object=AnyJsonObject())


def regex(pattern: str) -> Constraint:
    """Demands a text that the whole regular expression matches."""
    return Constraint(regex=pattern)


def grammar(text: str) -> Constraint:
    """Demands a text of the grammar, written as llama.cpp (GBNF) or Lark writes it."""
    return Constraint(grammar=text)


def choices(*texts: str) -> Constraint:
    """Demands one of the texts."""
    return Constraint(choices=Choices(texts=texts))
