"""Configuration: one frozen dataclass per service, filled from flags, `BATON_*` variables and defaults, in that order.

A field becomes a flag through `option(...)` metadata: `max_num_seqs` is `--max-num-seqs` and `BATON_MAX_NUM_SEQS`.
Only `main` modules read it. Errors name the flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from services.core.errors import ConfigError

T = TypeVar("T")


def option(
    default: Any,
    help: str,
    *,
    check: Callable[[Any], bool] | None = None,
    must: str = "",
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that is also a flag. `check` validates a given value and `must` says what it demands."""
    metadata = {"help": help, "check": check, "must": must, "choices": choices}
    if isinstance(default, list):
        raise TypeError("use a tuple for a repeatable option")
    return dataclasses.field(default=default, metadata=metadata)


def positive(value: float) -> bool:
    return value > 0


def port(value: int) -> bool:
    return 0 <= value <= 65535


def add_arguments(parser: argparse.ArgumentParser, config_type: type) -> None:
    """Adds every option of `config_type`. Absent flags stay absent, so that the environment can speak."""
    for field in _options(config_type):
        flag = _flag(field.name)
        kind, repeated = _kind(config_type, field.name)
        default = "" if field.default in (None, "", ()) else f" (default: {field.default})"
        text = f"{field.metadata['help']}{default} [{_variable(field.name)}]".replace("%", "%%")
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        elif repeated:
            parser.add_argument(flag, action="append", default=argparse.SUPPRESS, help=text)
        else:
            metavar = None if field.metadata["choices"] else kind.__name__.upper()
            parser.add_argument(flag, default=argparse.SUPPRESS, help=text, metavar=metavar)


def load(config_type: type[T], arguments: argparse.Namespace, environ: Mapping[str, str] | None = None) -> T:
    """Builds the config; raises ConfigError naming the flag (or the variable) that is wrong."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for field in _options(config_type):
        name = field.name
        kind, repeated = _kind(config_type, name)
        if hasattr(arguments, name):
            raw, origin = getattr(arguments, name), _flag(name)
        elif _variable(name) in environ:
            raw, origin = environ[_variable(name)], _variable(name)
            raw = tuple(part for part in raw.split(",") if part) if repeated else raw
        else:
            continue
        if repeated:
            value: Any = tuple(_convert(part, kind, origin) for part in raw)
        else:
            value = _convert(raw, kind, origin)
        _validate(field, value, origin)
        values[name] = value
    return config_type(**values)


def _options(config_type: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(config_type) if "help" in field.metadata]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return "BATON_" + name.upper()


def _kind(config_type: type, name: str) -> tuple[type, bool]:
    """(value type, repeated) of a field annotated `T`, `T | None` or `tuple[T, ...]`."""
    hint = typing.get_type_hints(config_type)[name]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def _convert(raw: Any, kind: type, origin: str) -> Any:
    if isinstance(raw, kind):
        return raw
    if kind is bool:
        word = raw.lower()
        if word in ("1", "true", "yes", "on"):
            return True
        if word in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{origin}: {raw!r} is not true or false")
    try:
        return kind(raw)
    except ValueError:
        raise ConfigError(f"{origin}: {raw!r} is not {'a whole number' if kind is int else 'a number'}") from None


def _validate(field: dataclasses.Field[Any], value: Any, origin: str) -> None:
    choices, check = field.metadata["choices"], field.metadata["check"]
    if choices and value not in choices:
        raise ConfigError(f"{origin}: {value!r} is not one of {', '.join(choices)}")
    if check is not None and not all(check(part) for part in (value if isinstance(value, tuple) else (value,))):
        raise ConfigError(f"{origin}: {value!r} {field.metadata['must'] or 'is out of range'}")
