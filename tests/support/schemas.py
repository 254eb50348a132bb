"""Draws JSON Schemas that answers can be constrained to, and writes their instances as answers write them.

Owns: the strategy; what of JSON's many ways to write a value answers use (docs/constraints.md); and checking an answer.
Never: how an instance is drawn (hypothesis-jsonschema does it).
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, TypeVar

import hypothesis
import hypothesis.strategies as st
from hypothesis.internal.conjecture import utils as conjecture
from hypothesis_jsonschema import _from_schema, from_schema
from jsonschema import Draft202012Validator

T = TypeVar("T")
NAMES = ("a", "b", "not", "naïve", "名", 'quo"te', "$ref", "with space", "🏃", "zz")
WORDS = ("", "yes", "no", "naïve", "名前", "🏃‍♂️", 'a "quoted" \\ word', "line\nbreak", "0", "null")
PATTERNS = (
    *("^[a-c]{1,5}$", "^[0-9]{2,4}-[0-9]{2}$", "^(x|yz){0,3}$", "^[é-ü]?$", "^[A-Za-z_]{3}$"),
    *("^(?:ja|nein)$", "^[^ ]{1,4}$"),
)
"""Python and JavaScript take these for the same, which is not so of \\d and \\w."""
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
_COMPACT: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}
_UNWRITTEN = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]|\n\\Z")


class _Many(conjecture.many):  # type: ignore[misc]
    """Counts elements as hypothesis-jsonschema 0.23 asks for them: by `more`, which newer hypothesis has no longer."""

    def more(self) -> bool:
        if self._depth is None:
            self._each = iter(self.__enter__())
        if next(self._each, self) is not self:
            return True
        self.__exit__(None)
        return False


_from_schema.cu = types.SimpleNamespace(**{**vars(conjecture), "many": _Many})  # type: ignore[attr-defined]


def schemas(*, short: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Draws schemas with definitions. Those that are `short` have no instance of more than some hundred characters."""
    definition = st.one_of(_objects(short, _schemas(short, depth=0)), _strings(short))
    plain = _objects(short, _schemas(short), fewest=1)
    referring = _objects(short, _schemas(short, depth=1, with_ref=True), fewest=1)
    return st.one_of(
        plain,
        _containers(short, _schemas(short, depth=1)),
        st.tuples(referring, definition).map(lambda pair: {**pair[0], "$defs": {"d/é": pair[1]}}),
    )


def _schemas(short: bool, *, depth: int = 2, with_ref: bool = False) -> st.SearchStrategy[dict[str, Any]]:
    leaves = st.one_of(_numbers(short), _strings(short), _values())
    if with_ref:
        leaves = st.one_of(st.just({"$ref": "#/$defs/d~1%C3%A9"}), leaves)
    drawn = leaves
    for _ in range(depth):
        drawn = st.one_of(leaves, _containers(short, drawn))
    return drawn


def _values() -> st.SearchStrategy[dict[str, Any]]:
    values = st.one_of(st.sampled_from(WORDS), st.integers(-99, 99), st.booleans(), st.none())
    nested = st.one_of(
        values, st.lists(values, max_size=2), st.dictionaries(st.sampled_from(NAMES), values, max_size=2)
    )
    return st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        values.map(lambda value: {"const": value}),
        nested.map(lambda value: {"const": value}),
        st.lists(nested, min_size=1, max_size=4).map(lambda found: {"enum": found}),
        st.sampled_from(WORDS).map(lambda word: {"type": ["null", "string"], "enum": [word, None]}),
    )


def _numbers(short: bool) -> st.SearchStrategy[dict[str, Any]]:
    whole = st.tuples(st.integers(-120, 120), st.integers(0, 300)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    )
    steps = st.sampled_from([2, 3, 5, 7]).map(
        lambda step: {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": step}
    )
    # Bounds with few digits: what lies between them may have as many as it likes.
    real = st.tuples(st.integers(-400, 400), st.integers(1, 800)).map(
        lambda pair: {"type": "number", "exclusiveMinimum": pair[0] / 4, "maximum": (pair[0] + pair[1]) / 4}
    )
    free = st.sampled_from([{"type": "integer"}, {"type": "number"}, {"type": "integer", "minimum": 7}])
    return st.one_of(whole, steps) if short else st.one_of(whole, steps, real, free)


def _strings(short: bool) -> st.SearchStrategy[dict[str, Any]]:
    bounded = st.tuples(st.integers(0, 3), st.integers(0, 5)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": sum(pair)}
    )
    pattern = st.sampled_from(PATTERNS).map(lambda regex: {"type": "string", "pattern": regex})
    formatted = st.sampled_from(FORMATS).map(lambda name: {"type": "string", "format": name})
    free = st.sampled_from([{"type": "string"}, {"type": "string", "minLength": 2}])
    return st.one_of(bounded, pattern) if short else st.one_of(bounded, pattern, formatted, free)


def _containers(short: bool, inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(_objects(short, inner), _arrays(short, inner), _alternatives(inner))


def _objects(
    short: bool, inner: st.SearchStrategy[dict[str, Any]], *, fewest: int = 0
) -> st.SearchStrategy[dict[str, Any]]:
    @st.composite
    def draw_object(draw: Callable[[st.SearchStrategy[Any]], Any]) -> dict[str, Any]:
        names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=fewest, max_size=3))
        schema: dict[str, Any] = {"type": "object", "properties": {name: draw(inner) for name in names}}
        if names:
            schema["required"] = draw(st.lists(st.sampled_from(names), unique=True))
        schema["additionalProperties"] = False if short else draw(st.one_of(st.booleans(), inner))
        return schema

    return draw_object()


def _arrays(short: bool, inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    bounded = st.tuples(inner, st.integers(0, 1), st.integers(0, 2)).map(
        lambda drawn: {"type": "array", "items": drawn[0], "minItems": drawn[1], "maxItems": sum(drawn[1:])}
    )
    fixed = st.lists(inner, min_size=1, max_size=2).map(
        lambda drawn: {"type": "array", "prefixItems": drawn, "items": False, "minItems": len(drawn)}
    )
    free = inner.map(lambda drawn: {"type": "array", "items": drawn})
    return st.one_of(bounded, fixed) if short else st.one_of(bounded, fixed, free)


def _alternatives(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(inner, min_size=1, max_size=3).map(lambda drawn: {"anyOf": drawn})


def drawn(strategy: st.SearchStrategy[T], count: int, seed: int = 0) -> list[T]:
    """Returns some examples, the same ones every time."""
    found: list[T] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def collect(example: T) -> None:
        found.append(example)

    collect()
    return found


_NEWER_FORMATS = {
    "uuid": st.uuids().map(str),
    "duration": st.from_regex(
        r"P([1-9][0-9]?W|[1-9][0-9]?Y[1-9]M[1-9]D(T[1-9]H[1-9]M[1-9]S)?|T[1-9]M)", fullmatch=True
    ),
}
"""Formats that draft 7 does not have: without these, any text would be drawn."""


def instances(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Draws instances of a schema that answers can write."""
    drawn = from_schema(_as_draft_7(schema), custom_formats=_NEWER_FORMATS)
    return drawn.filter(lambda instance: Draft202012Validator(schema).is_valid(instance) and _is_written(instance))


def _as_draft_7(schema: Any) -> Any:
    """Returns the schema in the words of the draft that hypothesis-jsonschema knows."""
    if not isinstance(schema, dict):
        return schema
    old = {**schema}
    for name in ("properties", "$defs"):
        if name in old:
            old[name] = {key: _as_draft_7(part) for key, part in old[name].items()}
    if "anyOf" in old:
        old["anyOf"] = [_as_draft_7(part) for part in old["anyOf"]]
    for name in ("items", "additionalProperties"):
        if name in old:
            old[name] = _as_draft_7(old[name])
    if "prefixItems" in old:
        old["additionalItems"] = old.pop("items")
        old["items"] = [_as_draft_7(part) for part in old.pop("prefixItems")]
    return old


def _is_written(instance: Any) -> bool:
    if isinstance(instance, str):
        return _UNWRITTEN.search(instance) is None
    if isinstance(instance, list):
        return all(map(_is_written, instance))
    if isinstance(instance, dict):
        return all(_is_written(name) and _is_written(part) for name, part in instance.items())
    return True


def written(instance: Any, schema: Any, root: Mapping[str, Any]) -> str:
    """Returns the instance as an answer under the schema writes it: properties in the schema's order, no blanks, no
    exponents, and only the escapes that JSON needs."""
    rules: dict[str, Any] = schema if isinstance(schema, dict) else {}
    if "$ref" in rules:
        return written(instance, root["$defs"]["d/é"], root)
    if "anyOf" in rules:
        definitions = {"$defs": root["$defs"]} if "$defs" in root else {}
        fits = (part for part in rules["anyOf"] if Draft202012Validator({**part, **definitions}).is_valid(instance))
        return written(instance, next(fits), root)
    if values := [rules["const"]] if "const" in rules else rules.get("enum"):
        # Equal objects may have their properties in another order.
        return json.dumps(next(value for value in values if _sorted(value) == _sorted(instance)), **_COMPACT)
    if isinstance(instance, dict):
        return _written_object(instance, rules, root)
    if isinstance(instance, list):
        prefix, rest = rules.get("prefixItems", []), rules.get("items", True)
        of = [*prefix, *[rest] * (len(instance) - len(prefix))]
        return f"[{','.join(written(part, each, root) for part, each in zip(instance, of, strict=False))}]"
    if isinstance(instance, float):
        digits = "0" if instance == 0 else format(Decimal(repr(instance)), "f")
        return digits if "." in digits else f"{digits}.0"
    return json.dumps(instance, **_COMPACT)


def _written_object(instance: Mapping[str, Any], rules: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    declared, rest = rules.get("properties", {}), rules.get("additionalProperties", True)
    names = [*(name for name in declared if name in instance), *(name for name in instance if name not in declared)]
    parts = (
        f"{json.dumps(name, **_COMPACT)}:{written(instance[name], declared.get(name, rest), root)}" for name in names
    )
    return f"{{{','.join(parts)}}}"


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
