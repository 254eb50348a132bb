"""Makes the values that are passed on thousands of times a second: messages, snapshots, views."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[_T]) -> type[_T]:
    """Makes a dataclass with slots that is compared and hashed by its fields. Nobody changes one that is made.

    The type checker sees to that: it takes the class as frozen. At run time it is not, since a frozen dataclass takes
    four times as long to make (each field goes through `object.__setattr__`), and the router makes several for each
    message of a worker.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
