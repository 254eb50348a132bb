"""Puts a deliberate bug into the real code: a `Mutant` is a context in which it is there."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias
from unittest import mock

Bug: TypeAlias = "contextlib.AbstractContextManager[Any]"
Mutant = Callable[[], Bug]


def replaced(owner: Any, name: str, new: Any) -> Bug:
    """Plants `new` as the attribute `name` of `owner`. Raises TypeError if it does not take what the original takes."""
    original = inspect.getattr_static(owner, name)
    if inspect.isfunction(original) and inspect.isfunction(new):
        parameters = inspect.signature(original).parameters.values()
        by_name = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        by_place = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        inspect.signature(new).bind(*by_place, **dict.fromkeys(by_name))
    return mock.patch.object(owner, name, new)


@contextlib.contextmanager
def both(*bugs: Bug) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(bug)
        yield
