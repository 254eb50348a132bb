"""Tests the averages by which workers' steps are compared."""

from __future__ import annotations

import pytest

from services.core.step_average import StepAverage

STEP = StepAverage(20.0, 16.0, 32_000.0, 10)


def test_the_first_ten_steps_weigh_the_same_and_each_further_one_a_tenth_of_all() -> None:
    average = StepAverage().after(10.0, 4, 400)
    assert average == StepAverage(10.0, 4, 400, 1)
    for _ in range(9):
        average = average.after(20.0, 14, 1400)
    assert (average.ms, average.tokens, average.attended_tokens) == pytest.approx((19.0, 13.0, 1300.0))
    assert average.after(29.0, 13, 1300).ms == pytest.approx(20.0)


def test_steps_like_each_other_may_be_told_together() -> None:
    apart = STEP
    for _ in range(7):
        apart = apart.after(40.0, 8, 1000)
    together = STEP.after(40.0, 8, 1000, num_steps=7)
    assert (together.ms, together.tokens) == pytest.approx((apart.ms, apart.tokens))
    assert together.attended_tokens == pytest.approx(apart.attended_tokens)
    assert StepAverage().after(40.0, 8, 1000, num_steps=7) == StepAverage(40.0, 8, 1000, 7)


def test_a_pause_is_no_slowness_but_steps_that_all_take_longer_are() -> None:
    average = STEP.after(1000 * STEP.ms, STEP.tokens, STEP.attended_tokens)
    assert average.ms == pytest.approx(1.3 * STEP.ms)
    assert STEP.after(64 * STEP.ms, 16 * STEP.tokens, STEP.attended_tokens).ms == pytest.approx(7.3 * STEP.ms)
    for _ in range(30):
        average = average.after(8 * STEP.ms, STEP.tokens, STEP.attended_tokens)
    assert average.ms > 7 * STEP.ms


def test_a_pause_in_the_first_step_is_over_after_twenty() -> None:
    average = StepAverage().after(20.0 * 20, 1, 100)
    for _ in range(20):
        average = average.after(20.0, 1, 100)
    assert average.ms < 40.0


@pytest.mark.parametrize(
    ("other", "ms"),
    [
        (STEP, 20.0),
        (StepAverage(1.0, 32.0, 32_000.0), 40.0),
        (StepAverage(1.0, 16.0, 96_000.0), 60.0),
        (StepAverage(1.0, 64.0, 96_000.0), 80.0),
        (StepAverage(1.0, 1.0, 10.0), 20.0),
    ],
)
def test_a_step_takes_at_most_as_much_longer_as_it_does_more(other: StepAverage, ms: float) -> None:
    assert STEP.most_ms(other) == ms


@pytest.mark.parametrize("unknown", [StepAverage(), StepAverage(20.0, 16.0), StepAverage(0.0, 16.0, 100.0)])
def test_who_has_measured_nothing_says_nothing(unknown: StepAverage) -> None:
    assert unknown.most_ms(STEP) == 0.0
