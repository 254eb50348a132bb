"""Reads what a tenants file says: its fields, their forms and their bounds.

Each error names the file, the line and the field. A file is taken as a whole or not at all. It is read as YAML's nodes,
which know their lines and are texts until a field says what they mean: so a country `no` is no boolean, and nothing
that a file says makes an object. Owns: the file's schema, which docs/tenants.md describes. Never: where the file is, or
when it is read (`gate.py`).
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import yaml

from services.core.errors import ConfigError
from services.core.printable import printable
from services.router.tenants.keys import ID_FORM
from services.router.tenants.tenant import PRIORITIES, ApiKey, Tenant, TenantLimits, TokenPrices

_MOST_RATE = 1_000_000
_MOST_TOKENS = 1_000_000_000_000
_MOST_LENGTH = (1 << 31) - 1
_MOST_PRICE = 1_000_000.0
_WEIGHTS = (0.001, 1000.0)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
_A_NAME = "must have 1 to 64 of a-z 0-9 . _ - and begin with a letter or a digit"
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_WHOLE = re.compile(r"[+-]?[0-9][0-9_]{0,24}", re.ASCII)
_NUMBER = re.compile(r"[+-]?([0-9][0-9_]{0,24}(\.[0-9]{0,24})?|\.[0-9]{1,24})([eE][+-]?[0-9]{1,3})?", re.ASCII)
_DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_CLOCK = r"[0-9]{2}:[0-9]{2}(:[0-9]{2})?(Z|z|[+-][0-9]{2}:[0-9]{2})"
_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # libyaml's is ten times as fast
_TIME = re.compile(rf"{_DATE}([Tt ]{_CLOCK})?", re.ASCII)


def read_tenants(data: bytes, origin: str) -> dict[str, Tenant]:
    """Returns the tenants by their names, in the file's order.

    Raises ConfigError, which begins with `origin` (the file) and the line, and names the field.
    """
    file = _Fields(node_of(data, origin), origin, "")
    field = file.demand("tenants")
    file.end()
    tenants, ids = dict[str, Tenant](), dict[str, str]()
    for name, each in field.entries("tenants"):
        tenants[name] = _tenant(name, each, ids)
    if not tenants:
        raise field.error("has no tenant: nobody could use the router")
    return tenants


def tenant_name(text: str, flag: str) -> str:
    """Returns the text if a tenant may have it as its name. Raises ConfigError, which begins with `flag`."""
    if not _NAME.fullmatch(text):
        raise ConfigError(f"{flag}: is {_quoted(text)}; a name {_A_NAME}")
    return text


def expiry(text: str, flag: str) -> float:
    """Returns the Unix seconds of a date, which means its beginning in UTC, or of a time with its offset. Raises
    ConfigError, which begins with `flag`."""
    moment = None
    if _TIME.fullmatch(text):
        with contextlib.suppress(ValueError):
            moment = datetime.fromisoformat(text.upper().replace(" ", "T"))
    if moment is None:
        raise ConfigError(f"{flag}: is {_quoted(text)}; it must be a date such as 2027-01-31, or 2027-01-31T12:00:00Z")
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


class _Field:
    """Is one value with the place where it stands, which reads it as what it must be."""

    def __init__(self, node: yaml.Node, origin: str, path: str, line: int = 0) -> None:
        """`line` is where the field's name stands."""
        self.node = node
        self.origin = origin
        self.path = path
        self._line = line or _line_of(node)

    @property
    def place(self) -> str:
        return f"{self.origin}:{self._line}: {printable(self.path[:200])}"

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.place}: {what}")

    def text(self) -> str:
        if not isinstance(self.node, yaml.ScalarNode):
            raise self.error("must be a text")
        if not self.node.value:
            raise self.error("is empty; leave the field out, or give it a value")
        return str(self.node.value)

    def name(self) -> str:
        text = self.text()
        if not _NAME.fullmatch(text):
            raise self.error(f"is {_quoted(text)}; it {_A_NAME}")
        return text

    def whole(self, low: int, high: int) -> int:
        text = self._unquoted("a whole number")
        number = int(text.replace("_", "")) if _WHOLE.fullmatch(text) else None
        if number is None or not low <= number <= high:
            raise self.error(f"is {_quoted(text)}; it must be a whole number in [{low}, {high}]")
        return number

    def number(self, low: float, high: float) -> float:
        text = self._unquoted("a number")
        number = float(text.replace("_", "")) if _NUMBER.fullmatch(text) else math.nan
        if not low <= number <= high:
            raise self.error(f"is {_quoted(text)}; it must be a number in [{low:g}, {high:g}]")
        return number

    def boolean(self) -> bool:
        text = self._unquoted("true or false")
        if text not in ("true", "false"):
            raise self.error(f"is {_quoted(text)}; it must be true or false")
        return text == "true"

    def time(self) -> float:
        return expiry(self.text(), self.place)

    def items(self, what: str) -> Iterator[_Field]:
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error(f"must be a list of {what}")
        for index, node in enumerate(self.node.value):
            yield _Field(node, self.origin, f"{self.path}[{index}]")

    def entries(self, what: str) -> Iterator[tuple[str, _Field]]:
        """Yields names and what stands under them."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"must have {what} by their names")
        for name, (line, node) in self.mapping().items():
            field = _Field(node, self.origin, f"{self.path}.{name}", line)
            if not _NAME.fullmatch(name):
                raise field.error(f"a name {_A_NAME}")
            yield name, field

    def mapping(self) -> dict[str, tuple[int, yaml.Node]]:
        """Returns the line of each key, and what stands under it."""
        found: dict[str, tuple[int, yaml.Node]] = {}
        for key, value in self.node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self.error("has a key that is no text")
            if key.value in found:
                raise self.error(f"has {printable(key.value)!r} on line {found[key.value][0]} and on {_line_of(key)}")
            found[key.value] = _line_of(key), value
        return found

    def fields(self) -> _Fields:
        return _Fields(self.node, self.origin, self.path, self._line)

    def _unquoted(self, what: str) -> str:
        text = self.text()
        if self.node.style:  # in quotes, or a block
            raise self.error(f"is a text in quotes; it must be {what}")
        return text


class _Fields:
    """Is a mapping whose fields are known; what is not taken from it is refused by `end`."""

    def __init__(self, node: yaml.Node, origin: str, path: str, line: int = 0) -> None:
        field = _Field(node, origin, path or "the file", line)
        if not isinstance(node, yaml.MappingNode):
            raise field.error("must have fields, each `name: value`")
        self._node, self._origin, self._path = node, origin, path
        self._left = field.mapping()
        self._known: list[str] = []

    def take(self, name: str) -> _Field | None:
        """Returns a field, or None if it is not there."""
        self._known.append(name)
        if name not in self._left:
            return None
        line, node = self._left.pop(name)
        return _Field(node, self._origin, self._inner(name), line)

    def demand(self, name: str) -> _Field:
        field = self.take(name)
        if field is None:
            raise _Field(self._node, self._origin, self._inner(name)).error("is missing")
        return field

    def end(self) -> None:
        for name, (line, node) in self._left.items():
            field = _Field(node, self._origin, self._inner(name), line)
            raise field.error(f"is no field; here may stand {', '.join(self._known)}")

    def _inner(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def node_of(data: bytes, origin: str) -> yaml.Node:
    """Returns what the file has, whatever it means, with the lines where it stands. Raises ConfigError."""
    try:
        text = data.decode()
        node = yaml.compose(text, Loader=_LOADER)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{origin}:{line}: it is not in UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{origin}:{mark.line + 1}" if mark is not None else origin
        raise ConfigError(f"{where}: {printable(error.problem or 'it is not YAML')}") from error
    except yaml.reader.ReaderError as error:
        line = text.encode().count(b"\n", 0, max(0, error.position)) + 1
        raise ConfigError(f"{origin}:{line}: {printable(error.reason)}") from error
    if node is None:
        raise ConfigError(f"{origin}: it is empty")
    return node


def _line_of(node: yaml.Node) -> int:
    """Returns the line on which a value begins, counted from 1."""
    return int(node.start_mark.line) + 1


def _tenant(name: str, field: _Field, ids: dict[str, str]) -> Tenant:
    """Returns a tenant. `ids` has the ids of keys so far, and where they stand."""
    fields, defaults = field.fields(), Tenant(name)
    keys = fields.take("keys")
    limits = fields.take("limits")
    models = fields.take("models")
    priority = fields.take("priority")
    weight = fields.take("weight")
    namespace = fields.take("cache_namespace")
    price = fields.take("price")
    log_prompts = fields.take("log_prompts")
    fields.end()
    return Tenant(
        name,
        keys=() if keys is None else tuple(_key(each, ids) for each in keys.items("keys")),
        limits=defaults.limits if limits is None else _limits(limits.fields()),
        models=None if models is None else _models(models),
        priorities=defaults.priorities if priority is None else _priorities(priority),
        weight=defaults.weight if weight is None else weight.number(*_WEIGHTS),
        cache_namespace="" if namespace is None else namespace.name(),
        prices=defaults.prices if price is None else _prices(price.fields()),
        logs_prompts=defaults.logs_prompts if log_prompts is None else log_prompts.boolean(),
    )


def _key(field: _Field, ids: dict[str, str]) -> ApiKey:
    fields = field.fields()
    key_id, digest, expires = fields.demand("id"), fields.demand("sha256"), fields.take("expires")
    fields.end()
    name, hexadecimal = key_id.text(), digest.text()
    if not ID_FORM.fullmatch(name):
        raise key_id.error(f"is {_quoted(name)}; it must have 4 to 32 of a-z 0-9, as in bk_<id>_<secret>")
    if name in ids:
        raise key_id.error(f"is {_quoted(name)}, which {ids[name]} has already")
    if not _DIGEST.fullmatch(hexadecimal):
        raise digest.error("must be the key's SHA-256, 64 of 0-9 a-f, as `baton keys hash` prints it")
    ids[name] = field.path
    return ApiKey(name, bytes.fromhex(hexadecimal), None if expires is None else expires.time())


def _limits(fields: _Fields) -> TenantLimits:
    per_s, burst = fields.take("requests_per_s"), fields.take("burst_requests")
    per_min, burst_tokens = fields.take("tokens_per_min"), fields.take("burst_tokens")
    concurrent = fields.take("concurrent_requests")
    max_input, max_output = fields.take("max_input_tokens"), fields.take("max_output_tokens")
    fields.end()
    for of_burst, of_rate, rate in ((burst, per_s, "requests_per_s"), (burst_tokens, per_min, "tokens_per_min")):
        if of_burst is not None and of_rate is None:
            raise of_burst.error(f"needs {rate}, whose burst it is")
    rate_per_s = None if per_s is None else per_s.number(1e-4, _MOST_RATE)
    rate_per_min = None if per_min is None else per_min.whole(1, _MOST_TOKENS)
    return TenantLimits(
        requests_per_s=rate_per_s,
        burst_requests=max(1, math.ceil(rate_per_s or 0)) if burst is None else burst.whole(1, _MOST_RATE),
        tokens_per_min=rate_per_min,
        burst_tokens=(rate_per_min or 1) if burst_tokens is None else burst_tokens.whole(1, _MOST_TOKENS),
        concurrent_requests=None if concurrent is None else concurrent.whole(1, _MOST_RATE),
        max_input_tokens=None if max_input is None else max_input.whole(1, _MOST_LENGTH),
        max_output_tokens=None if max_output is None else max_output.whole(1, _MOST_LENGTH),
    )


def _models(field: _Field) -> frozenset[str]:
    models = frozenset(each.text() for each in field.items("models"))
    if not models:
        raise field.error("has no model; leave it out to allow all")
    return models


def _priorities(field: _Field) -> tuple[int, int]:
    fields = field.fields()
    least, most = fields.take("min"), fields.take("max")
    fields.end()
    low = PRIORITIES[0] if least is None else least.whole(*PRIORITIES)
    high = PRIORITIES[1] if most is None else most.whole(*PRIORITIES)
    if low > high:
        raise field.error(f"has a min of {low}, above its max of {high}")
    return low, high


def _prices(fields: _Fields) -> TokenPrices:
    prompt, cached, output = fields.take("prompt"), fields.take("cached"), fields.take("output")
    fields.end()
    of_prompt = 0.0 if prompt is None else prompt.number(0, _MOST_PRICE)
    return TokenPrices(
        of_prompt,
        cached=of_prompt if cached is None else cached.number(0, _MOST_PRICE),
        output=0.0 if output is None else output.number(0, _MOST_PRICE),
    )


def _quoted(text: str) -> str:
    return repr(text[:40] + "…" if len(text) > 40 else text)
