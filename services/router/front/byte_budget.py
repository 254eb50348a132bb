"""Bounds the bytes of requests that the process holds at once: being read, at the tokenizer, queued or running.

Owns: the sum. Never: what is charged. gRPC and HTTP have one budget, since they fill the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from services.core.errors import Overloaded

RETRY_AFTER_S = 1.0
_LARGE_BYTES = 1 << 20


class ByteBudget:
    def __init__(self, limit_bytes: int, freed: Callable[[], None] = lambda: None) -> None:
        """`freed` is called when a request has given back at least a mebibyte."""
        self._limit_bytes = limit_bytes
        self._freed = freed
        self.used_bytes = 0

    def charge(self) -> Charge:
        """Returns the charge of one request, which is 0 at first."""
        return Charge(self)

    def add(self, num_bytes: int) -> None:
        """Adds to the sum, or raises Overloaded and adds nothing. A negative number is always accepted."""
        if num_bytes > 0 and self.used_bytes + num_bytes > self._limit_bytes:
            raise Overloaded("too many bytes of requests are waiting", retry_after_s=RETRY_AFTER_S)
        self.used_bytes += num_bytes
        if num_bytes <= -_LARGE_BYTES:
            self._freed()


class Charge:
    """Holds the bytes that one request takes of the budget: a context manager that gives all of them back at its
    end."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Adds to the charge, or raises Overloaded and leaves it as it was."""
        self.become(self.num_bytes + num_bytes)

    def become(self, num_bytes: int) -> None:
        """Sets the charge, or raises Overloaded and leaves it as it was."""
        self._budget.add(num_bytes - self.num_bytes)
        self.num_bytes = num_bytes

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.become(0)
