"""Puts a deliberate bug into the real code: a `Mutant` is a context in which it is there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias
from unittest import mock

Bug: TypeAlias = "contextlib.AbstractContextManager[Any]"
Mutant = Callable[[], Bug]


def replaced(owner: Any, name: str, new: Any) -> Bug:
    return mock.patch.object(owner, name, new)


@contextlib.contextmanager
def both(*bugs: Bug) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(bug)
        yield
