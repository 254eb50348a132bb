"""Tests what an engine says of the steps that it has run."""

from __future__ import annotations

from services.core.step_average import StepAverage
from services.engine.schedule.sequence import ScheduledSequence, StepPlan, StepResult
from services.engine.step_tally import StepTally

RAN = StepResult({}, 0.0, 0.0, 0.0)


def part(start: int, count: int, *, decodes: bool = False) -> ScheduledSequence:
    return ScheduledSequence(0, start, (1,) * count, (), is_decode=decodes)


def test_steps_with_prompts_and_steps_without_are_averaged_apart() -> None:
    tally = StepTally()
    decodes = (part(99, 1, decodes=True), part(49, 1, decodes=True))
    tally.step(StepPlan(1, decodes), RAN, 1.0, 1.5)
    attended = 100 + 50
    assert tally.decode_step == StepAverage(500.0, 2, attended, 1)
    assert tally.prefill_step == StepAverage()
    tally.step(StepPlan(2, (*decodes, part(10, 4))), RAN, 2.0, 3.0)
    assert tally.prefill_step == StepAverage(1000.0, 6, attended + 11 + 12 + 13 + 14, 1)
    assert tally.decode_step == StepAverage(500.0, 2, attended, 1), "it is as it was"


def test_a_step_that_raised_is_none_of_them() -> None:
    tally = StepTally()
    tally.step(StepPlan(1, (part(0, 8),)), RuntimeError(), 1.0, 9.0)
    assert tally.prefill_step == StepAverage()
