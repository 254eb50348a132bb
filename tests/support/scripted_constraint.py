"""Provides a `TokenConstraint` without a library: the output is one of some lists of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from services.core.errors import InvalidRequest
from services.engine.schedule.constraint import Bits, allow


class OneOf:
    """Allows the tokens that lead on in one of the lists; the output may end where one of them does."""

    def __init__(self, lists: Sequence[Sequence[int]], taken: Sequence[int] = ()) -> None:
        self._lists = [list(each) for each in lists]
        self.taken = list(taken)

    def copy(self) -> OneOf:
        return OneOf(self._lists, self.taken)

    def take(self, token_ids: Sequence[int]) -> None:
        self.taken += token_ids
        if not self._leading_on(self.taken):
            raise InvalidRequest("constraint", f"does not take {self.taken}")

    def fill(self, bits: Bits) -> bool:
        leading_on = self._leading_on(self.taken)
        allow(bits, next_of(leading_on, len(self.taken)))
        return self.taken in leading_on

    def _leading_on(self, output: list[int]) -> list[list[int]]:
        return [each for each in self._lists if each[: len(output)] == output]


def next_of(lists: Sequence[Sequence[int]], at: int) -> list[int]:
    return sorted({each[at] for each in lists if len(each) > at})
