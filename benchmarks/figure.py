"""One measured figure, and the table of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Figure:
    """Median and spread of repeated measurements of one thing."""

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


def table(figures: Sequence[Figure]) -> str:
    rows = [("what", "median", "spread", "target"), *(figure.row() for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
