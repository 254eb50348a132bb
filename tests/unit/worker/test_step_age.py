"""Tests how long the step under way is said to run: routers take one that runs for too long for stuck."""

from __future__ import annotations

import pytest

from services.worker.report import StepAge


def test_time_in_which_the_process_did_not_run_is_taken_off() -> None:
    age = StepAge()
    assert age.ms(1, 500.0, 100.0) == 500.0
    assert age.ms(1, 40_000.0, 128.0) == pytest.approx(12_000.0)


def test_what_was_missed_before_a_step_is_not() -> None:
    age = StepAge()
    assert age.ms(1, 20_000.0, 10.0) == 20_000.0
    assert age.ms(2, 30_000.0, 25.0) == 30_000.0, "another step"
    assert age.ms(2, 0.0, 26.0) == 0.0
    assert age.ms(2, 0.0, 40.0) == 0.0
    assert age.ms(2, 31_000.0, 41.0) == pytest.approx(30_000.0), "a step after a rest"
