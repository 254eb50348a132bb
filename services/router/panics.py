"""Makes errors of what a library throws when it panics.

The tokenizers library is written in Rust. A panic there is raised as a BaseException, so it would pass every guard
against the defects of one request, and end tasks that many requests need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class LibraryPanic(RuntimeError):
    """Replaces a panic of a library, with its message."""


def panics_are_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Makes the function raise `LibraryPanic` where a library that it calls panics."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # pyo3 gives the class no importable place
                raise
            raise LibraryPanic(str(error)) from error

    return guarded
