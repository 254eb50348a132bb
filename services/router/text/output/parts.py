"""Defines what a piece of an output adds to the answer. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from services.core.records import record


@record
class CallPart:
    """Is a part of a call of a tool, as it becomes known: first its id and name, then its arguments' text."""

    index: int
    """Which of the output's calls, counted from 0."""
    call_id: str = ""
    name: str = ""
    arguments: str = ""


@record
class Parsed:
    """Holds what became known with a piece of the output. What it has of each kind is in order; between kinds the
    order is that of the fields, since an output has them in this order."""

    reasoning: str = ""
    text: str = ""
    calls: Sequence[CallPart] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text or self.calls)

    @staticmethod
    def of(pieces: Sequence[Parsed]) -> Parsed:
        """Returns the sum. Arguments that follow others of the same call make one part with them."""
        return Parsed(
            "".join(piece.reasoning for piece in pieces),
            "".join(piece.text for piece in pieces),
            _joined(part for piece in pieces for part in piece.calls),
        )


def _joined(parts: Iterable[CallPart]) -> tuple[CallPart, ...]:
    joined = []
    for _, group in itertools.groupby(parts, lambda part: part.index):
        same = list(group)
        arguments = "".join(part.arguments for part in same)
        joined.append(CallPart(same[0].index, same[0].call_id, same[0].name, arguments))
    return tuple(joined)
