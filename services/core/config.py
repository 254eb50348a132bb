"""Fills one frozen dataclass per service from flags, `BATON_*` variables and defaults, in that order.

A field becomes a flag through `option(...)` metadata: `max_num_seqs` is `--max-num-seqs` and `BATON_MAX_NUM_SEQS`.
Only `main` modules read it. Errors name the flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from services.core.errors import ConfigError

T = TypeVar("T")

DAY_S = 86_400.0
"""Longest duration, in seconds, that a flag accepts. So a mistake shows at once, and the duration overflows in no unit
that it is converted to."""
_INT_RANGE = (-(1 << 31), (1 << 31) - 1)
"""Smallest and largest whole number that a flag accepts: they go into 32-bit fields of messages and gRPC options."""
DEFAULT_PORT = 50051
"""A router's, for clients."""
DEFAULT_CONTROL_PORT = 50052
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8")

KEPT_WEIGHTS = ("gguf", "gptq", "awq")
"""Kinds of quantised checkpoints whose weights may stay as they are, as `--quantization` names them."""
QUANTIZATION = ("auto", "none", "int8", "int4", *KEPT_WEIGHTS)
KEPT_BLOCKS_FILE = "gguf-blocks"
"""The file in a model's directory with the weights of the GGUF file that it was converted from, as safetensors. Its
name does not say so, since other engines take every `*.safetensors` for a part of the model."""


def option(
    default: Any,
    help: str,
    *,
    check: Callable[[Any], bool] | None = None,
    must: str = "",
    choices: tuple[str, ...] = (),
    metavar: str = "",
) -> Any:
    """Returns a dataclass field that is also a flag. `check` says whether a value is allowed, and `must` describes that
    in the error message. `metavar` stands for a value in the help. Raises TypeError if the default is a list."""
    metadata = {"help": help, "check": check, "must": must, "choices": choices, "metavar": metavar}
    if isinstance(default, list):
        raise TypeError("use a tuple for a repeatable option")
    return dataclasses.field(default=default, metadata=metadata)


FEWEST_BLOCKS = 2
"""The fewest blocks of a pool: a decode worker takes a handoff only where one block is left for what follows the
prompt."""


def positive(value: float) -> bool:
    """Returns whether the value is greater than 0."""
    return value > 0


def duration(value: float) -> bool:
    """Returns whether `value` is a duration of 1 ms to a day, in seconds. A shorter interval would only keep a core
    busy."""
    return 0.001 <= value <= DAY_S


def duration_or_zero(value: float) -> bool:
    """Returns whether `value` is a duration of 0 to a day, in seconds; 0 means not to wait."""
    return 0 <= value <= DAY_S


def device(value: str) -> bool:
    """Returns whether `value` names a device that an engine has kernels for."""
    return re.fullmatch(r"cpu|cuda(:\d{1,3})?", value, re.ASCII) is not None


LEAST_CAPACITY, MOST_CAPACITY = 1e-3, 1e6
"""Bounds of what a worker declares as its capacity beside others."""
A_DEVICE = "must be cpu, cuda, or one GPU such as cuda:0"
A_DURATION = "must be in [0.001, 86400]"
A_DURATION_OR_ZERO = "must be in [0, 86400]"
A_LOG_INTERVAL = "must be 0, or in [0.001, 86400]"


def demand_kv_dtype(kv_dtype: str, device: str) -> None:
    """Raises ConfigError if keys and values cannot be kept in this type on the device."""
    if kv_dtype == "int8" and device != "cpu":
        raise ConfigError(f"--kv-dtype: int8 works only on a CPU; give bfloat16 or auto for --device {device}")


def port(value: int) -> bool:
    """Returns whether `value` is a port number; 0 lets the system pick one."""
    return 0 <= value <= 65535


def duration_option(default: float, help: str) -> Any:
    """Returns an option whose value is a `duration`."""
    return option(default, help, check=duration, must=A_DURATION)


def port_option(default: int | None, help: str) -> Any:
    """Returns an option whose value is a `port`."""
    return option(default, help, check=port, must="must be in [0, 65535]")


def positive_option(default: int, help: str) -> Any:
    """Returns an option whose value is `positive`."""
    return option(default, help, check=positive, must="must be positive")


def log_interval(value: float) -> bool:
    """Returns whether `value` is 0 (no log lines) or a `duration`, in seconds: a loop with a shorter one would not
    pause."""
    return value == 0 or duration(value)


def add_arguments(parser: argparse.ArgumentParser, config_type: type, *, has_variables: bool = True) -> None:
    """Adds a flag to `parser` for every option of `config_type`. A flag that is not given is absent from the parsed
    arguments, so that `load` can take the variable. Without `has_variables` the help names none."""
    for field, kind, repeated in _options(config_type):
        flag = _flag(field.name)
        default = "" if field.default in (None, "", ()) else f" (default: {field.default})"
        variable = f" [{_variable(field.name)}]" if has_variables else ""
        text = f"{field.metadata['help']}{default}{variable}".replace("%", "%%")
        choices = field.metadata["choices"]
        metavar = field.metadata["metavar"] or (f"{{{','.join(choices)}}}" if choices else kind.__name__.upper())
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        elif repeated:
            parser.add_argument(flag, action="append", default=argparse.SUPPRESS, help=text, metavar=metavar)
        else:
            parser.add_argument(flag, default=argparse.SUPPRESS, help=text, metavar=metavar)


def load(config_type: type[T], arguments: argparse.Namespace, environ: Mapping[str, str] | None = None) -> T:
    """Returns the configuration; raises ConfigError, which names the flag or the variable that is wrong."""
    environ = os.environ if environ is None else environ
    return config_type(**{each[0].name: _read(*each, arguments, environ) for each in _options(config_type)})


def flags(config: Any, of: type, environ: Mapping[str, str] | None = None) -> list[str]:
    """Returns the flags with which `load` gives a configuration of the type `of` the values that `config` has.

    They are flags of the options that both have from one declaration, and that do not have these values anyway, by
    default or by the variables in `environ`. So what is secret and stands in the environment is not shown to others.
    """
    environ = os.environ if environ is None else environ
    found: list[str] = []
    for field, kind, repeated in _options(of):
        if type(config).__dataclass_fields__.get(field.name) is not field:
            continue
        value: Any = getattr(config, field.name)
        if value == _read(field, kind, repeated, argparse.Namespace(), environ):
            continue
        flag = _flag(field.name)
        if kind is bool:
            found.append(flag if value else f"--no-{flag[2:]}")
        else:
            found += [f"{flag}={part}" for part in (value if repeated else (value,))]
    return found


def _read(
    field: dataclasses.Field[Any], kind: type, repeated: bool, arguments: argparse.Namespace, environ: Mapping[str, str]
) -> Any:
    name = field.name
    if hasattr(arguments, name):
        raw, origin = getattr(arguments, name), _flag(name)
    elif _variable(name) in environ:
        raw, origin = environ[_variable(name)], _variable(name)
        raw = tuple(part for part in raw.split(",") if part) if repeated else raw
    else:
        return field.default
    value = tuple(_convert(part, kind, origin) for part in raw) if repeated else _convert(raw, kind, origin)
    _validate(field, value, origin)
    return value


def _options(config_type: type) -> list[tuple[dataclasses.Field[Any], type, bool]]:
    """Returns (field, type of its value, whether it is repeatable) for every option of `config_type`."""
    hints = typing.get_type_hints(config_type)
    fields = (field for field in dataclasses.fields(config_type) if "help" in field.metadata)
    return [(field, *_kind(hints[field.name])) for field in fields]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return "BATON_" + name.upper()


def _kind(hint: Any) -> tuple[type, bool]:
    """Returns (value type, whether it is repeatable) of a field annotated `T`, `T | None` or `tuple[T, ...]`."""
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
        value = kind(raw)
    except ValueError:
        raise ConfigError(f"{origin}: {raw!r} is not {'a whole number' if kind is int else 'a number'}") from None
    if kind is float and math.isnan(value):
        raise ConfigError(f"{origin}: {raw!r} is not a number")
    if kind is int and not _INT_RANGE[0] <= value <= _INT_RANGE[1]:
        raise ConfigError(f"{origin}: {raw[:32]!r} is out of range")
    return value


def _validate(field: dataclasses.Field[Any], value: Any, origin: str) -> None:
    choices, check = field.metadata["choices"], field.metadata["check"]
    if choices and value not in choices:
        raise ConfigError(f"{origin}: {value!r} is not one of {', '.join(choices)}")
    for part in value if isinstance(value, tuple) else (value,):
        if check is not None and not check(part):
            raise ConfigError(f"{origin}: {part!r} {field.metadata['must'] or 'is out of range'}")
