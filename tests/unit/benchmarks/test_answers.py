"""Times of answers, percentiles, goodput."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.answers import Answer, Objective, distribution, goodput, percentile


def test_an_answer_tells_its_times() -> None:
    answer = Answer(10.0, [10.5, 10.6, 10.8, 10.8])
    assert answer.complete
    assert answer.ttft_ms == pytest.approx(500)
    assert answer.tpot_ms == pytest.approx(100)
    assert answer.gaps_ms == pytest.approx([100, 200, 0])


def test_gaps_count_where_they_end() -> None:
    answer = Answer(0.0, [1.0, 2.0, 4.0, 7.0])
    assert answer.gaps_within(2.0, 6.0) == pytest.approx([1000, 2000])
    assert answer.gaps_within(7.5, 9.0) == []


def test_one_token_takes_no_time_per_output_token() -> None:
    assert Answer(0.0, [1.0]).tpot_ms == 0
    assert Answer(0.0, [1.0]).gaps_ms == []


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 10), (50, 25), (25, 17.5), (100, 40)], ids=["least", "middle", "between", "most"]
)
def test_percentiles_lie_on_the_line_between_samples(percent: float, value: float) -> None:
    assert percentile([40, 10, 30, 20], percent) == pytest.approx(value)


def test_a_single_sample_is_every_percentile() -> None:
    assert {percentile([3.0], percent) for percent in (0, 37, 100)} == {3.0}


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_goodput_counts_answers_that_met_both() -> None:
    objective = Objective(ttft_ms=1000, tpot_ms=100)
    good = Answer(0.0, [1.0, 1.05])
    late = Answer(0.0, [1.1, 1.15])
    slow = Answer(0.0, [0.5, 0.7])
    refused = Answer(0.0, refused="RESOURCE_EXHAUSTED")
    broken = Answer(0.0, [0.5, 0.55], refused="UNAVAILABLE")
    assert goodput([good, late, slow, refused, broken, good], objective, 4.0) == 0.5


def test_a_distribution_rises_to_the_whole() -> None:
    points = distribution([float(number) for number in range(1001)])
    assert points[0] == (0.0, 0.0)
    assert points[-1] == (1000.0, 100.0)
    assert (990.0, 99.0) in [(round(value, 6), round(share, 6)) for value, share in points]
    assert all(one <= other for one, other in itertools.pairwise(points))
