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


def lines(svg: str) -> list[list[tuple[float, float]]]:
    found = re.findall(r"<polyline points='([^']*)'", svg)
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in each.split())] for each in found]


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


def test_points_stand_where_their_values_are() -> None:
    svg = Chart("t", Axis("x, s"), Axis("y, s")).svg([Series("c", "n", ((0.0, 0.0), (5.0, 5.0), (10.0, 10.0)))])
    (low, middle, high) = lines(svg)[0]
    assert low[0] < middle[0] < high[0]
    assert low[1] > middle[1] > high[1]  # SVG counts downwards
    assert middle[0] - low[0] == pytest.approx(high[0] - middle[0], abs=0.2)
    assert svg.count("<circle") == 3


def test_equal_factors_are_equal_steps_on_a_logarithmic_axis() -> None:
    svg = Chart("t", Axis("x, s", logarithmic=True), Axis("y, s")).svg([Series("c", "n", ((1, 1), (10, 1), (100, 1)))])
    (one, ten, hundred) = lines(svg)[0]
    assert ten[0] - one[0] == pytest.approx(hundred[0] - ten[0], abs=0.2)


def test_a_point_at_0_has_no_place_on_a_logarithmic_axis() -> None:
    """Draws a gap of 0 ms, as between tokens that come in one message."""
    chart = Chart("t", Axis("x, ms", logarithmic=True), Axis("y, ms"))
    assert len(lines(chart.svg([Series("c", "n", ((0, 0), (1, 1), (10, 10)))]))[0]) == 2
    with pytest.raises(ValueError, match="no points"):
        chart.svg([Series("c", "n", ((0, 0),))])


@pytest.mark.parametrize(
    ("axis", "values", "ticks"),
    [
        (Axis("x"), [3.0, 9.0], [0, 2, 4, 6, 8, 10]),
        (Axis("x"), [0.0, 1200.0], [0, 500, 1000, 1500]),
        (Axis("x", logarithmic=True), [12.0, 430.0], [10, 20, 50, 100, 200, 500]),
        (Axis("x", logarithmic=True), [64.0, 64.0], [50, 100]),
    ],
)
def test_ticks_are_round_and_reach_past_the_values(axis: Axis, values: list[float], ticks: list[float]) -> None:
    assert axis.ticks(values) == pytest.approx(ticks)


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
    root = ElementTree.fromstring(pictures["presets-real-azure"])
    charts = [element for element in root if element.tag.endswith("svg")]
    assert [(chart.attrib["x"] != "0", chart.attrib["y"] != "0") for chart in charts] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    assert int(root.attrib["width"]) == 2 * int(charts[0].attrib["width"])
    for chart, sees_slow in zip(charts, (True, True, False), strict=True):
        said = texts(ElementTree.tostring(chart, encoding="unicode"))
        assert "2" in said
        assert ("1000" in said) == sees_slow


def test_nine_lines_are_told_apart() -> None:
    svg = CHARTS["itl"].svg([Series("itl", f"line {number}", ((1.0, 0.0), (2.0, 100.0))) for number in range(9)])
    strokes = re.findall(r"<polyline [^>]*stroke='([^']*)'[^>]*stroke-dasharray='([^']*)'", svg)
    assert len(set(strokes)) == 9
