"""Pictures: what is in them, and where points stand."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from benchmarks.figure import Series
from benchmarks.plots import CHARTS, draw
from services.sim.chart import Axis, Chart

LINES = [
    Series("itl", "split & apart", ((10.0, 0.0), (100.0, 100.0))),
    Series("itl", "mixed", ((20.0, 0.0), (900.0, 100.0))),
]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def test_a_picture_has_title_units_ticks_and_every_line_by_name() -> None:
    said = texts(CHARTS["itl"].svg(LINES))
    assert "Gaps between tokens while prompts arrive" in said
    assert "inter-token latency, ms" in said
    assert {"10", "100", "1000"} <= set(said)
    assert {"split & apart", "mixed"} <= set(said)


def test_every_axis_names_its_unit() -> None:
    for chart in CHARTS.values():
        assert chart.title
        for axis in (chart.x, chart.y):
            assert re.search(r", (ms|%|tokens/s)$|GB/s$|^KiB of |sequences|tokens", axis.label), axis.label


def test_a_point_at_0_has_no_place_on_a_logarithmic_axis() -> None:
    """Draws a gap of 0 ms, as between tokens that come in one message."""
    chart = Chart("t", Axis("x, ms", logarithmic=True), Axis("y, ms"))
    assert {"1", "10"} <= set(texts(chart.svg([Series("c", "n", ((0, 0), (1, 1), (10, 10)))])))
    with pytest.raises(ValueError, match="no points"):
        chart.svg([Series("c", "n", ((0, 0),))])


def test_a_picture_of_the_same_lines_is_the_same() -> None:
    assert CHARTS["itl"].svg(LINES) == CHARTS["itl"].svg(LINES)


def test_lines_of_several_files_are_told_apart() -> None:
    pictures = draw({"here": LINES, "there": [LINES[0]]})
    assert set(pictures) == {"itl"}
    assert {"mixed (here)", "split & apart (here)", "split & apart (there)"} <= set(texts(pictures["itl"]))
    assert draw({"here": []}) == {}


def test_nothing_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="no points"):
        CHARTS["itl"].svg([Series("itl", "empty", ())])


def test_a_page_has_its_charts_in_rows_whose_axes_are_the_same() -> None:
    fast, slow = ((1.0, 0.0), (2.0, 100.0)), ((500.0, 0.0), (900.0, 100.0))
    series = [
        Series("presets-real-azure-ttft-simulated", "sticky", fast),
        Series("presets-real-azure-ttft-measured", "sticky", slow),
        Series("presets-real-azure-itl-measured", "sticky", fast),
    ]
    pictures = draw({"a": series})
    assert set(pictures) == {"presets-real-azure"}
    said = texts(pictures["presets-real-azure"])
    assert [said.count(CHARTS[each.chart].title) for each in series] == [1, 1, 1]
    assert said.count("1000") == 2


def test_nine_lines_are_told_apart() -> None:
    svg = CHARTS["itl"].svg([Series("itl", f"line {number}", ((1.0, 0.0), (2.0, 100.0))) for number in range(9)])
    strokes = set(re.findall(r'style="fill: none; ([^"]*stroke: #(?!dddddd|000000)[^"]*)', svg))
    assert len(strokes) == 9
