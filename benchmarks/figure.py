"""Defines one measured figure, the ratio of two, a line of a picture, and the table of figures."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Figure:
    """Holds median and spread of repeated measurements of one thing, a sample for each round."""

    name: str
    unit: str
    samples: tuple[float, ...]
    target: str = ""
    """In words: what the project wants it to be, and on which machine."""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def row(self) -> tuple[str, str, str, str]:
        spread = f"{min(self.samples):.4g} … {max(self.samples):.4g}" if len(self.samples) > 1 else ""
        return self.name, f"{self.median:.4g} {self.unit}", spread, self.target

    def plain(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "median": self.median}


@dataclasses.dataclass(frozen=True)
class Series:
    """Holds one line of a picture, of which `plots` draws one for each `chart`: points (x, y) in the units of its
    axes."""

    chart: str
    name: str
    points: tuple[tuple[float, float], ...]

    def plain(self) -> dict[str, object]:
        return dataclasses.asdict(self)


Findings = list[Figure | Series]
"""What a benchmark has measured."""


def ratio(name: str, ours: Sequence[float], theirs: Sequence[float], target: str = "") -> Figure:
    """Returns ours divided by theirs, round by round: what disturbs a machine for minutes meets both sides of a round.

    Raises ValueError if there are not as many rounds of one as of the other.
    """
    return Figure(name, "x", tuple(one / other for one, other in zip(ours, theirs, strict=True)), target)


def table(figures: Sequence[Figure]) -> str:
    rows = [("what", "median", "spread", "target"), *(figure.row() for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
