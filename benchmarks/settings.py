"""Makes command-line flags of frozen dataclasses: what a benchmark can be told is a dataclass beside it.

Owns: the names, types and help texts of the flags. Never: what a setting means.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def setting(default: Any, help: str) -> Any:
    """Returns a dataclass field that is also a flag: `length_scale` is `--length-scale`. A tuple of numbers is written
    with commas between them."""
    return dataclasses.field(default=default, metadata={"help": help})


def add_flags(parser: argparse.ArgumentParser, title: str, settings_type: type) -> None:
    """Adds a group of flags, one for each field of `settings_type`."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(settings_type)
    for field in dataclasses.fields(settings_type):
        shown = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            type=_numbers if typing.get_origin(hints[field.name]) is tuple else hints[field.name],
            default=field.default,
            help=f"{field.metadata['help']} (default: {shown})" if shown != "" else field.metadata["help"],
        )


def read(settings_type: type[T], arguments: argparse.Namespace) -> T:
    """Returns the settings that the parsed arguments hold."""
    names = (field.name for field in dataclasses.fields(settings_type))  # type: ignore[arg-type]
    return settings_type(**{name: getattr(arguments, name) for name in names})


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))
