"""Reads what an output is constrained to, as OpenAI's clients and vLLM's spell it, into a request's `constraint`.

OpenAI has `response_format`, vLLM `structured_outputs` and, in older versions, `guided_json` and its like. They are the
same thing, so two of them at once are refused. Owns: these spellings, and where in the body each part of a constraint
stands. Never: what a constraint may be; `services/rpc/constraints.py` says it for all fronts.

Every constraint is kept to strictly, whatever `strict` says. What OpenAI demands of the schemas of a strict format (all
properties required, none additional) is not demanded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.v1 import types_pb2
from services.core.errors import InvalidRequest
from services.router.front.http.body import Body, as_list, as_text
from services.rpc.constraints import MAX_CHOICES
from services.rpc.json_schemas import schema_text

FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
Params = Mapping[str, str]
"""Maps fields of a request to their names in the body."""


def read_constraint(body: Body, constraint: types_pb2.Constraint) -> Params:
    """Fills in the constraint, if the body has one, and returns where its parts stand there. Raises InvalidRequest."""
    found: dict[str, Params] = {}
    for name in FIELDS:
        value = body.take(name)
        if value is None or (name == "response_format" and _format(body.record(name)) == "text"):
            continue
        if found:
            raise InvalidRequest(name, f"cannot be given together with {next(iter(found))}")
        match name:
            case "response_format":
                found[name] = _response_format(body.record(name), constraint)
            case "structured_outputs":
                found[name] = _structured_outputs(body.record(name), constraint)
            case _:
                found[name] = _one(name.removeprefix("guided_"), value, name, constraint)
    return {"constraint": next(iter(found)), **next(iter(found.values()))} if found else {}


def _format(given: Body) -> str:
    kind = given.text("type")
    if kind not in ("text", "json_object", "json_schema"):
        shown = "missing" if kind is None else repr(kind[:32])
        raise InvalidRequest(given.path("type"), f"is {shown}; it must be 'text', 'json_object' or 'json_schema'")
    return kind


def _response_format(given: Body, constraint: types_pb2.Constraint) -> Params:
    kind = _format(given)
    if kind == "json_object":
        given.refuse_unknown()
        return _one("json_object", True, "response_format", constraint)
    described = given.record("json_schema")
    given.refuse_unknown()
    return _described(described, constraint)


def read_text_format(given: Body, constraint: types_pb2.Constraint) -> Params:
    """Reads the format of a response's text, in which the schema stands beside its name. Returns as `read_constraint`
    does."""
    kind, place = _format(given), given.path("type").removesuffix(".type")
    if kind == "text":
        return {}
    params = _described(given, constraint) if kind == "json_schema" else _one("json_object", True, place, constraint)
    given.refuse_unknown()
    return {"constraint": place, **params}


def _described(described: Body, constraint: types_pb2.Constraint) -> Params:
    """Reads a schema with its name."""
    for label in ("name", "description"):
        described.text(label)
    described.boolean("strict")
    schema, place = described.take("schema"), described.path("schema")
    described.refuse_unknown()
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(place, "is missing" if schema is None else "must be an object")
    return _one("json", schema, place, constraint)


_KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Parts of vLLM's `structured_outputs` that change what is made.
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")


def _structured_outputs(given: Body, constraint: types_pb2.Constraint) -> Params:
    for name in _OPTIONS:
        if given.boolean(name):
            raise InvalidRequest(given.path(name), "is not supported by this server")
    kinds = [kind for kind in _KINDS if given.take(kind) is not None and not (kind == "json_object" and _is_off(given))]
    given.refuse_unknown()
    if len(kinds) != 1:
        count = "none" if not kinds else " and ".join(kinds[:2])
        raise InvalidRequest("structured_outputs", f"has {count}; it must have one of {', '.join(_KINDS)}")
    return _one(kinds[0], given.take(kinds[0]), given.path(kinds[0]), constraint)


def _is_off(given: Body) -> bool:
    return not given.boolean("json_object")


def _one(kind: str, value: Any, place: str, constraint: types_pb2.Constraint) -> Params:
    match kind:
        case "json":
            constraint.json_schema = as_text(value, place) if isinstance(value, str) else schema_text(place, value)
            return {"constraint.json_schema": place}
        case "json_object":
            constraint.json_object.SetInParent()
            return {"constraint.json_object": place}
        case "choice":
            constraint.choices.SetInParent()
            for index, text in enumerate(as_list(value, place, MAX_CHOICES)):
                constraint.choices.texts.append(as_text(text, f"{place}[{index}]"))
            return {"constraint.choices": place, "constraint.choices.texts": place}
        case _:
            setattr(constraint, kind, as_text(value, place))
            return {f"constraint.{kind}": place}
