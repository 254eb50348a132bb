"""Draws charts of lines as SVG by matplotlib, which the extra `plot` installs: text comes out."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # imported when something is drawn: it takes long, and few installations have it
    from matplotlib.axes import Axes


class Line(Protocol):
    """Has a name, and points (x, y) in the units of the axes."""

    @property
    def name(self) -> str: ...

    @property
    def points(self) -> Sequence[tuple[float, float]]: ...


@dataclass(frozen=True)
class Curve:
    """Is a line that has nothing else."""

    name: str
    points: Sequence[tuple[float, float]]


_SIZE = (7.6, 5.2)
"""Of one chart with its legend, in inches."""
_COLOURS = ("#1f5fa8", "#c4511d", "#2f7d4f", "#7b4397", "#8a6d00", "#444444", "#b8296b", "#14868c", "#7a4a2b")
_DASHES = ("-", "--", ":", "-.", (0, (5, 5)), (0, (1, 5)), (0, (14, 4)), (0, (6, 2, 2, 2, 2, 2)), (0, (3, 7)))
"""Each line has a colour and a dash of its own, so that a print in grey still tells them apart."""


@dataclass(frozen=True)
class Axis:
    """Describes an axis: its label with a unit, and whether equal steps are equal factors."""

    label: str
    logarithmic: bool = False

    def has(self, value: float) -> bool:
        """Returns whether the value has a place: equal factors never lead to 0."""
        return value > 0 or not self.logarithmic


@dataclass(frozen=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    markers: bool = True
    """Whether each point is shown; a distribution has too many."""
    joined: bool = True
    """Whether the points of a line are joined."""

    def svg(self, lines: Sequence[Line]) -> str:
        """Returns the whole picture, without points that have no place on an axis. Raises ValueError if no point has
        one."""
        return page([[(self, lines)]])

    def draw(self, axes: Axes, lines: Sequence[Line]) -> None:
        """Draws title, axes, lines and legend."""
        from matplotlib.ticker import LogLocator, NullLocator

        axes.set_title(self.title, loc="left", fontsize="medium", fontweight="bold")
        for axis, drawn in ((self.x, axes.xaxis), (self.y, axes.yaxis)):
            drawn.set_label_text(axis.label)
            if axis.logarithmic:
                drawn.axes.set(**{f"{drawn.axis_name}scale": "log"})
                drawn.set_major_locator(LogLocator(subs=(1, 2, 5)))
                drawn.set_minor_locator(NullLocator())
            drawn.set_major_formatter("{x:g}")
        axes.grid(color="#ddd")
        placed = [[(x, y) for x, y in line.points if self.x.has(x) and self.y.has(y)] for line in lines]
        if not any(placed):
            raise ValueError(f"{self.title}: no points")
        for number, (line, points) in enumerate(zip(lines, placed, strict=True)):
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                label=line.name,
                color=_COLOURS[number % len(_COLOURS)],
                linestyle=_DASHES[number % len(_DASHES)] if self.joined else "none",
                marker="o" if self.markers else "none",
            )
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), frameon=False)


def page(rows: Sequence[Sequence[tuple[Chart, Sequence[Line]]]]) -> str:
    """Returns one picture of several charts: rows from above, charts of a row from the left. Those of a row have axes
    of the same range, so that they can be compared."""
    import matplotlib
    from matplotlib.figure import Figure

    width = max(map(len, rows))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "baton", "text.parse_math": False}):
        figure = Figure(figsize=(_SIZE[0] * width, _SIZE[1] * len(rows)), layout="constrained")
        places = figure.subplots(len(rows), width, squeeze=False, sharex="row", sharey="row")
        for row, row_places in zip(rows, places, strict=True):
            for axes in row_places[len(row) :]:
                axes.remove()
            for (chart, lines), axes in zip(row, row_places, strict=False):
                axes.tick_params(labelleft=True)
                chart.draw(axes, lines)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
