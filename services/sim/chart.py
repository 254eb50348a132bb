"""Draws a chart of lines as SVG, by itself: axes with units, ticks, a legend. Pure: text comes out.

Each line has a colour and a dash of its own, so that a print in grey still tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from xml.sax.saxutils import escape


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


_WIDTH, _HEIGHT = 760, 460
"""Without the legend, which stands below, a row for each line."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 52, 64
_LEGEND_ROW = 22
_COLOURS = ("#1f5fa8", "#c4511d", "#2f7d4f", "#7b4397", "#8a6d00", "#444444", "#b8296b", "#14868c", "#7a4a2b")
_DASHES = ("", "8 4", "2 3", "10 3 2 3", "5 5", "1 5", "14 4", "6 2 2 2 2 2", "3 7")
_STYLE = "font-family='Helvetica, Arial, sans-serif' fill='#222'"


@dataclass(frozen=True)
class Axis:
    """Describes an axis: its label with a unit, and whether equal steps are equal factors."""

    label: str
    logarithmic: bool = False

    def has(self, value: float) -> bool:
        """Returns whether the value has a place: equal factors never lead to 0."""
        return value > 0 or not self.logarithmic

    def place(self, value: float, least: float, most: float) -> float:
        """Returns where `value` lies between `least` (0) and `most` (1)."""
        if self.logarithmic:
            value, least, most = math.log(value), math.log(least), math.log(most)
        return (value - least) / (most - least) if most > least else 0.5

    def ticks(self, values: Sequence[float]) -> list[float]:
        """Returns round numbers from below the values to above them."""
        least, most = min(values), max(values)
        if self.logarithmic:
            return _round_factors(least, most)
        step = _round_step(max(most - min(least, 0.0), 1e-9) / 5)
        first, last = math.floor(min(least, 0.0) / step), math.ceil(most / step - 1e-9)
        return [number * step for number in range(first, max(last, first + 1) + 1)]


@dataclass(frozen=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    markers: bool = True
    """Whether each point is shown; a distribution has too many."""
    joined: bool = True
    """Whether the points of a line are joined."""

    def svg(self, lines: Sequence[Line], others: Sequence[Line] = ()) -> str:
        """Returns the whole picture, without points that have no place on an axis. Its axes have room for the points of
        `others` too, which are not drawn: so pictures can be compared. Raises ValueError if no point has a place."""
        shown = [self._placed(line) for line in lines]
        if not any(shown):
            raise ValueError(f"{self.title}: no points")
        points = [point for line in (*shown, *map(self._placed, others)) for point in line]
        x_ticks, y_ticks = self.x.ticks([x for x, _ in points]), self.y.ticks([y for _, y in points])

        def at(x: float, y: float) -> tuple[float, float]:
            across = self.x.place(x, x_ticks[0], x_ticks[-1]) * (_WIDTH - _LEFT - _RIGHT)
            up = self.y.place(y, y_ticks[0], y_ticks[-1]) * (_HEIGHT - _TOP - _BOTTOM)
            return round(_LEFT + across, 1), round(_HEIGHT - _BOTTOM - up, 1)

        height = _HEIGHT + _LEGEND_ROW * len(lines) + 8
        parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{height}' "
            f"viewBox='0 0 {_WIDTH} {height}'>",
            f"<rect width='{_WIDTH}' height='{height}' fill='white'/>",
            _text(_LEFT, 28, self.title, 17, "start", weight="bold"),
            _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 16, self.x.label, 14),
            _text(22, (_TOP + _HEIGHT - _BOTTOM) / 2, self.y.label, 14, turned=True),
        ]
        for tick in x_ticks:
            x, y = at(tick, y_ticks[0])
            parts += [_grid(x, _TOP, x, y), _text(x, y + 20, f"{tick:g}", 13)]
        for tick in y_ticks:
            x, y = at(x_ticks[0], tick)
            parts += [_grid(x, y, _WIDTH - _RIGHT, y), _text(x - 8, y + 4, f"{tick:g}", 13, "end")]
        for number, line in enumerate(shown):
            parts += self._line(number, [at(x, y) for x, y in line])
        parts += _legend([line.name for line in lines])
        return "\n".join([*parts, "</svg>", ""])

    def _placed(self, line: Line) -> tuple[tuple[float, float], ...]:
        return tuple(point for point in line.points if self.x.has(point[0]) and self.y.has(point[1]))

    def _line(self, number: int, points: Sequence[tuple[float, float]]) -> list[str]:
        colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts = []
        if self.joined:
            stroke = f"stroke='{colour}' stroke-width='2.2' stroke-dasharray='{dash}'"
            parts.append(f"<polyline points='{path}' fill='none' {stroke}/>")
        if self.markers:
            parts += [f"<circle cx='{x}' cy='{y}' r='4' fill='{colour}'/>" for x, y in points]
        return parts


def _legend(names: Sequence[str]) -> list[str]:
    parts = []
    for number, name in enumerate(names):
        y = _HEIGHT + 8 + _LEGEND_ROW * number
        colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
        parts.append(
            f"<line x1='{_LEFT}' y1='{y - 4}' x2='{_LEFT + 36}' y2='{y - 4}' stroke='{colour}' "
            f"stroke-width='2.2' stroke-dasharray='{dash}'/>"
        )
        parts.append(_text(_LEFT + 46, y, name, 14, "start"))
    return parts


def _text(
    x: float, y: float, text: str, size: int, anchor: str = "middle", *, weight: str = "normal", turned: bool = False
) -> str:
    turn = f" transform='rotate(-90 {x:g} {y:g})'" if turned else ""
    return (
        f"<text x='{x:g}' y='{y:g}' font-size='{size}' font-weight='{weight}' text-anchor='{anchor}' {_STYLE}{turn}>"
        f"{escape(text)}</text>"
    )


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='#ddd'/>"


def _round_step(step: float) -> float:
    """Returns the first of 1, 2, 5, 10 … times a power of ten that is no less than `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def _round_factors(least: float, most: float) -> list[float]:
    """Returns 1, 2, 5 times powers of ten, from the last that is no more than `least` to the first not below `most`."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 2)
    candidates = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    first = max(number for number, each in enumerate(candidates) if each <= least * (1 + 1e-9))
    last = min(number for number, each in enumerate(candidates) if each >= most * (1 - 1e-9))
    return candidates[first : max(last, first + 1) + 1]
