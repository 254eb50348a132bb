"""Checks a JSON Schema that outputs are to be valid under, before a worker compiles it. Pure.

Owns: which keywords are served (docs/constraints.md has the list, with what shows that each is honoured), and bounds of
what a schema may ask for. Every error is an InvalidRequest that names the field, and in it the keyword with its JSON
Pointer. Never: whether the schema can be satisfied; the worker's library says that.

A keyword that is not served is refused, even one that JSON Schema lets a validator ignore: to ignore it would give
answers that were not asked for. Some bounds stand for time that the library spends where nothing can stop it, and some
for its stack, which a long chain of references overflows.
"""

from __future__ import annotations

import json
import math
import re
import urllib.parse
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NoReturn

from services.core.errors import InvalidRequest
from services.core.printable import printable
from services.rpc.regexes import MAX_REGEX_BYTES, check_regex

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_LEVELS = 32
"""The most schemas that may be within one another."""
MAX_SCHEMAS = 1024
"""The most schemas in one, itself included: each property, item and alternative has one."""
MAX_VALUES = 8192
"""The most JSON values in a schema, keywords' values and all: those of `enum` are most of them where there are many."""
MAX_VALUE_LEVELS = 100
MAX_PATTERN_PROPERTIES = 16
"""They must be told apart from one another, which takes long for many."""
MAX_COUNT = 100_000
"""The most characters or items that a schema may ask for or limit to."""
MAX_MULTIPLE_DIGITS = 1024
"""The largest `multipleOf`, and the largest common multiple of all, counted without their points: 0.25 counts as 25."""
MAX_BOUND = (1 << 63) - 1
MAX_PLACES = 15
"""The most places after the point of a number's bounds."""
MAX_CONSTANT = 1 << 53
MAX_CONSTANT_DIGITS = 15
"""The largest numbers of constants, and the most digits of those with a point: the library rounds others, and outputs
would not have the constant."""
MAX_SHOWN_CHARS = 200

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""What may stand between the parts of a JSON document. A model with nothing to say would else say spaces for ever."""
JSON_OPTIONS: dict[str, object] = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": '"\\bfnrt',
}
"""How the library reads schemas, whoever writes one into a grammar.

Without escapes by number: the library takes names of properties that are written with them for others than they are,
and would let `{"a":1,"\\u0061":"x"}` pass where `a` is an integer. Without coerced oneOf: an anyOf lets more pass.
"""
FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
_UNDER_A_MINUTE = {"date-time": "^.{17}[0-5]", "time": "^.{6}[0-5]"}
"""What texts of these formats match unless they have the second 60."""
TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
NEWEST_DRAFT = "https://json-schema.org/draft/2020-12/schema"
OLDER_DRAFTS = frozenset(
    (
        "https://json-schema.org/draft/2019-09/schema",
        "http://json-schema.org/draft-07/schema",
        "http://json-schema.org/draft-06/schema",
    )
)
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$comment"),
        *("contentEncoding", "contentMediaType", "contentSchema", "discriminator"),
    )
)
"""Keywords that restrict nothing."""

_UNPRINTED = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
"""Characters that outputs cannot have in strings, and what is no character: half of a surrogate pair."""
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


def check_json_schema(field: str, text: str) -> None:
    """Raises InvalidRequest. `field` is where the text stands."""
    num_bytes = len(text) if text.isascii() else len(text.encode())
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidRequest(field, f"has {num_bytes} bytes; at most {MAX_SCHEMA_BYTES} are allowed")
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"is not JSON: {error}") from error
    _check_values(field, schema)
    _Walk(field, schema).run()


def schema_text(field: str, schema: Any) -> str:
    """Returns a schema that was parsed as JSON text again. Raises InvalidRequest if it is large, before it is text."""
    _check_values(field, schema)
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def as_compiled(schema: Any, *, are_names: bool = False) -> Any:
    """Returns a schema as the library gets it: without the second 60 in times. `are_names`: it is no schema but an
    object of them by names.

    The library allows it in every minute, RFC 3339 in the last of a day alone, and `datetime` of Python in none.
    """
    if isinstance(schema, list):
        return [as_compiled(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        name: part
        if name in ("const", "enum") and not are_names
        else as_compiled(part, are_names=name in _OF_NAMES and not are_names)
        for name, part in schema.items()
    }
    name = schema.get("format")
    if isinstance(name, str) and name in _UNDER_A_MINUTE:
        made["allOf"] = [*made.get("allOf", ()), {"pattern": _UNDER_A_MINUTE[name]}]
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _check_values(field: str, root: Any) -> None:
    """Raises InvalidRequest for too many values or levels, and for what JSON text can say and outputs cannot."""
    level, num_values, num_chars = [root], 1, 0
    for _ in range(MAX_VALUE_LEVELS):
        parts: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                parts += value
                parts += value.values()
            elif isinstance(value, list):
                parts += value
            elif isinstance(value, str):
                num_chars += len(value)
                if num_chars > MAX_SCHEMA_BYTES:
                    raise InvalidRequest(field, f"has strings of more than {MAX_SCHEMA_BYTES} characters")
                if (found := _UNPRINTED.search(value)) is not None:
                    shown = printable(found[0])
                    raise InvalidRequest(field, f"has the character {shown} in a string, which outputs cannot have")
            elif isinstance(value, float) and not math.isfinite(value):
                raise InvalidRequest(field, "has a number that is out of range")
        num_values += len(parts)
        if num_values > MAX_VALUES:
            raise InvalidRequest(field, f"has more than {MAX_VALUES} values")
        if not parts:
            return
        level = parts
    raise InvalidRequest(field, f"has more than {MAX_VALUE_LEVELS} levels of lists and objects")


class _Walk:
    """Goes through all schemas of a document, those that are only referred to included."""

    def __init__(self, field: str, root: Any) -> None:
        self._field = field
        self._root = root
        self._is_newest = True
        self._waiting: list[tuple[Any, str, int]] = []
        """Schemas still to be looked at, with their pointers and levels."""
        self._seen: set[int] = set()
        self._same: dict[int, list[int]] = {}
        """For a schema that says of a value what others say of the same value: those."""
        self._multiple = 1
        self._regex_chars = 0

    def run(self) -> None:
        if self._root is False:
            self._fail("", "is false: no output is valid under it")
        if isinstance(self._root, dict):
            self._draft(self._root)
        self._waiting.append((self._root, "", 1))
        num_schemas = 0
        while self._waiting:
            schema, pointer, level = self._waiting.pop()
            num_schemas += 1
            if num_schemas > MAX_SCHEMAS:
                self._fail("", f"has more than {MAX_SCHEMAS} schemas in it")
            if level > MAX_SCHEMA_LEVELS:
                self._fail(pointer, f"is below {MAX_SCHEMA_LEVELS} levels of schemas, the most that are allowed")
            self._schema(schema, pointer, level)
        self._check_loops()

    def _draft(self, root: dict[str, Any]) -> None:
        draft = root.get("$schema", NEWEST_DRAFT)
        name = draft.removesuffix("#") if isinstance(draft, str) else ""
        if name != NEWEST_DRAFT and name not in OLDER_DRAFTS:
            self._fail("/$schema", f"is {_shown(draft)}; {NEWEST_DRAFT} is served, and 2019-09, draft-07 and draft-06")
        self._is_newest = name == NEWEST_DRAFT

    def _schema(self, schema: Any, pointer: str, level: int) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            self._fail(pointer, "is no schema: it must be an object, true or false")
        if id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        for keyword, value in schema.items():
            if keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
                continue
            check = _CHECKS.get(keyword)
            if check is None:
                self._fail(f"{pointer}/{_escaped(keyword)}", "is a keyword that is not served")
            check(self, schema, value, f"{pointer}/{_escaped(keyword)}", level)

    def _add(self, schema: Any, pointer: str, level: int, *, same_as: dict[str, Any] | None = None) -> None:
        self._waiting.append((schema, pointer, level + 1))
        if same_as is not None:
            self._same.setdefault(id(same_as), []).append(id(schema))

    def _fail(self, pointer: str, message: str) -> NoReturn:
        where = f"{_cut(printable(pointer))} " if pointer else ""
        raise InvalidRequest(self._field, f"{where}{message}")

    def _check_loops(self) -> None:
        """Raises InvalidRequest if a schema says of a value that it is what the same schema says of it."""
        done: set[int] = set()
        for start in self._same:
            path, on_path = [(start, iter(self._same[start]))], {start}
            while path:
                schema, others = path[-1]
                other = next(others, None)
                if other is None:
                    path.pop()
                    on_path.discard(schema)
                    done.add(schema)
                elif other in on_path:
                    self._fail("", "has a $ref that leads back to itself and says nothing of a value on its way")
                elif other not in done:
                    path.append((other, iter(self._same.get(other, ()))))
                    on_path.add(other)

    # One method for each kind of keyword's value

    def _only_at_top(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        if schema is not self._root:
            self._fail(pointer, "is only served at the top")
        if not isinstance(value, str):
            self._fail(pointer, "must be a string")

    def _one(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        self._add(value, pointer, level)

    def _named(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        for name, part in self._record(value, pointer).items():
            self._add(part, f"{pointer}/{_escaped(name)}", level)

    def _patterns(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        if len(self._record(value, pointer)) > MAX_PATTERN_PROPERTIES:
            self._fail(pointer, f"has {len(value)} entries; at most {MAX_PATTERN_PROPERTIES} are allowed")
        for name, part in value.items():
            self._regex(name, f"{pointer}/{_escaped(name)}")
            self._add(part, f"{pointer}/{_escaped(name)}", level)

    def _pattern(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        if not isinstance(value, str):
            self._fail(pointer, "must be a string")
        self._regex(value, pointer)

    def _regex(self, regex: str, pointer: str) -> None:
        self._regex_chars += len(regex)
        if self._regex_chars > MAX_REGEX_BYTES:
            self._fail(pointer, f"is with the others longer than {MAX_REGEX_BYTES} characters")
        try:
            check_regex(self._field, regex)
        except InvalidRequest as error:
            self._fail(pointer, error.description)

    def _alternatives(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        for index, part in enumerate(self._filled(value, pointer)):
            self._add(part, f"{pointer}/{index}", level, same_as=schema)

    def _prefix(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        if not self._is_newest:
            self._fail(pointer, "is a keyword of draft 2020-12, and $schema names an older one")
        self._listed(value, pointer, level)

    def _items(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        if not isinstance(value, list):
            self._add(value, pointer, level)
        elif self._is_newest:
            self._fail(pointer, "is a list, which draft 2020-12 calls prefixItems")
        else:
            self._listed(value, pointer, level)

    def _additional_items(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        if self._is_newest:
            self._fail(pointer, "is no keyword of draft 2020-12: use prefixItems and items")
        self._add(value, pointer, level)

    def _listed(self, value: Any, pointer: str, level: int) -> None:
        for index, part in enumerate(self._filled(value, pointer)):
            self._add(part, f"{pointer}/{index}", level)

    def _ref(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        if not (isinstance(value, str) and (value == "#" or value.startswith("#/"))):
            self._fail(pointer, f"is {_shown(value)}; it must point into this schema, with # or #/…")
        target = self._root
        for part in urllib.parse.unquote(value[2:]).split("/") if value != "#" else ():
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and name in target:
                target = target[name]
            elif isinstance(target, list) and _INDEX.fullmatch(name) and int(name) < len(target):
                target = target[int(name[:9])]
            else:
                self._fail(pointer, f"is {_shown(value)}, and nothing is there")
        self._same.setdefault(id(schema), []).append(id(target))
        if id(target) not in self._seen:
            self._waiting.append((target, value[1:], 1))

    def _type(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) and name in TYPES for name in names):
            self._fail(pointer, f"is {_shown(value)}; it must be of {', '.join(sorted(TYPES))}")

    def _enum(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        self._constant(schema, self._filled(value, pointer), pointer, level)

    def _constant(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        remaining = [value]
        while remaining:
            each = remaining.pop()
            if isinstance(each, dict | list):
                remaining += each.values() if isinstance(each, dict) else each
            elif isinstance(each, int | float) and not _is_exact(each):
                limits = f"those up to 2^53 and of {MAX_CONSTANT_DIGITS} digits"
                self._fail(pointer, f"has the number {_shown(each)}, and outputs have {limits}")

    def _format(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        if not (isinstance(value, str) and value in FORMATS):
            self._fail(pointer, f"is {_shown(value)}; served are {', '.join(sorted(FORMATS))}")

    def _required(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        if not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            self._fail(pointer, "must be a list of names")

    def _count(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
            self._fail(pointer, f"is {_shown(value)}; it must be a whole number in [0, {MAX_COUNT}]")

    def _count_of_properties(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        self._count(schema, value, pointer, level)
        names, required = schema.get("properties", {}), schema.get("required", [])
        if not (isinstance(names, dict) and isinstance(required, list) and names.keys() <= set(map(str, required))):
            self._fail(pointer, "is only served where all `properties` are `required`")
        if schema.get("additionalProperties") is not False and value > len(required) + 1:
            # Names that are not declared may come twice, and count once.
            self._fail(pointer, f"is {value}; with additional properties it may be one more than is `required`")

    def _bound(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            self._fail(pointer, f"is {_shown(value)}; it must be a number")
        if abs(value) > MAX_BOUND or _places(value) > MAX_PLACES:
            self._fail(
                pointer, f"is {_shown(value)}; at most 2^63-1 and {MAX_PLACES} places after the point are served"
            )
        if value != MAX_BOUND and int(float(value)) != int(value):
            self._fail(pointer, f"is {_shown(value)}, which would be rounded: whole numbers are exact up to 2^53")

    def _multiple_of(self, schema: dict[str, Any], value: Any, pointer: str, level: int) -> None:
        self._bound(schema, value, pointer, level)
        digits = int(Decimal(str(value)).scaleb(_places(value)))
        if not 0 < digits <= MAX_MULTIPLE_DIGITS:
            self._fail(pointer, f"is {_shown(value)}; its digits must be in [1, {MAX_MULTIPLE_DIGITS}]")
        self._multiple = math.lcm(self._multiple, digits)
        if self._multiple > MAX_MULTIPLE_DIGITS:
            self._fail(pointer, f"has with the others a common multiple of more than {MAX_MULTIPLE_DIGITS}")

    def _record(self, value: Any, pointer: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._fail(pointer, "must be an object")
        return value

    def _filled(self, value: Any, pointer: str) -> list[Any]:
        if not (isinstance(value, list) and value):
            self._fail(pointer, "must be a list, and not empty")
        return value


_CHECKS: dict[str, Callable[[_Walk, dict[str, Any], Any, str, int], None]] = {
    "$schema": _Walk._only_at_top,
    "$id": _Walk._only_at_top,
    "$defs": _Walk._named,
    "definitions": _Walk._named,
    "$ref": _Walk._ref,
    "type": _Walk._type,
    "enum": _Walk._enum,
    "const": _Walk._constant,
    "anyOf": _Walk._alternatives,
    "oneOf": _Walk._alternatives,
    "allOf": _Walk._alternatives,
    "minimum": _Walk._bound,
    "maximum": _Walk._bound,
    "exclusiveMinimum": _Walk._bound,
    "exclusiveMaximum": _Walk._bound,
    "multipleOf": _Walk._multiple_of,
    "minLength": _Walk._count,
    "maxLength": _Walk._count,
    "pattern": _Walk._pattern,
    "format": _Walk._format,
    "items": _Walk._items,
    "prefixItems": _Walk._prefix,
    "additionalItems": _Walk._additional_items,
    "minItems": _Walk._count,
    "maxItems": _Walk._count,
    "properties": _Walk._named,
    "patternProperties": _Walk._patterns,
    "additionalProperties": _Walk._one,
    "required": _Walk._required,
    "minProperties": _Walk._count_of_properties,
    "maxProperties": _Walk._count_of_properties,
}


def _is_exact(number: int | float) -> bool:
    """Returns whether an output can have this number as it is."""
    if isinstance(number, int):
        return abs(number) <= MAX_CONSTANT
    num_digits = len(Decimal(str(number)).normalize().as_tuple().digits)
    return abs(number) <= MAX_CONSTANT and num_digits <= MAX_CONSTANT_DIGITS


def _places(number: int | float) -> int:
    exponent = Decimal(str(number)).normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _shown(value: Any) -> str:
    return _cut(printable(json.dumps(value, ensure_ascii=False)))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
