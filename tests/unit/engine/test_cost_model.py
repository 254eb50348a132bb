"""Tests what a worker learns of the costs of its steps, and what it does not learn."""

from __future__ import annotations

import pytest

from services.engine.cost_model import CostModel, StepCosts

CANARY_TOKENS, WHOLE_STEP_TOKENS = 17, 512
FIXED_MS, TOKEN_MS = 20.0, 0.9


def prefill_ms(num_tokens: int) -> float:
    return FIXED_MS + TOKEN_MS * num_tokens


class Steps:
    """Feeds a cost model with steps, one after the other, in virtual time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.model = CostModel()

    def run(self, num_prefill_tokens: int, num_decodes: int, ms: float, *, held_up: bool = False) -> None:
        self.now += ms / 1e3
        self.model.observe(num_prefill_tokens, num_decodes, ms, self.now, held_up=held_up)

    def rest(self, seconds: float) -> None:
        self.now += seconds

    @property
    def costs(self) -> StepCosts:
        return self.model.at(self.now)

    def prompt_ms(self, num_tokens: int) -> float:
        """Returns what routers reckon a prompt to take."""
        return num_tokens * self.costs.ms_per_prefill_token


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def warm(steps: Steps) -> Steps:
    """Returns those of a worker that has measured its costs at its start."""
    for num_tokens in (16, 64, 256, WHOLE_STEP_TOKENS):
        steps.model.calibrate(num_tokens, 0, prefill_ms(num_tokens))
    for num_sequences in (1, 8) * 3:
        steps.model.calibrate(0, num_sequences, 10.0 + 2.0 * (num_sequences - 1))
    return steps


def test_costs_follow_the_steps(steps: Steps) -> None:
    assert (steps.costs.ms_per_prefill_token, steps.costs.ms_per_decode_step) == (0.0, 0.0)
    steps.run(100, 0, 200.0)
    steps.run(0, 4, 30.0)
    assert (steps.costs.ms_per_prefill_token, steps.costs.ms_per_decode_step) == (2.0, 30.0)
    for _ in range(150):
        steps.run(100, 0, 100.0)
        steps.run(0, 4, 60.0)
    assert steps.costs.ms_per_prefill_token == pytest.approx(1.0, rel=1e-3)
    assert steps.costs.ms_per_decode_step == pytest.approx(60.0, rel=1e-3)


def test_further_prompt_tokens_are_told_from_the_step_itself(steps: Steps) -> None:
    assert steps.costs.ms_per_further_prefill_token == 0.0
    steps.run(100, 0, 5.0 + 100 * 0.05)
    assert steps.costs.ms_per_further_prefill_token == pytest.approx(0.1), "its share, while nothing else is known"
    for number in range(60):
        tokens = 32 + 16 * (number % 20)
        steps.run(tokens, 0, 5.0 + tokens * 0.05)
    assert steps.costs.ms_per_further_prefill_token == pytest.approx(0.05, rel=0.02)
    assert steps.costs.ms_per_prefill_token > 0.06


def test_decodes_in_a_prefill_step_are_not_charged_to_it(steps: Steps) -> None:
    steps.run(0, 4, 30.0)
    steps.run(100, 4, 230.0)
    assert steps.costs.ms_per_prefill_token == pytest.approx(2.0)


def test_a_few_prompt_tokens_say_nothing(steps: Steps) -> None:
    steps.run(3, 4, 30.0)
    assert steps.costs.ms_per_prefill_token == 0.0


def test_further_sequences_are_told_from_the_step_itself(steps: Steps) -> None:
    for number in range(60):
        sequences = 1 + number % 9
        steps.run(0, sequences, 20.0 + 3.0 * (sequences - 1))
    assert steps.costs.ms_per_decode_step == pytest.approx(20.0, rel=0.02)
    assert steps.costs.ms_per_decode_sequence == pytest.approx(3.0, rel=0.02)
    for _ in range(400):  # the same number for long says nothing new about it
        steps.run(0, 9, 44.0)
    assert steps.costs.ms_per_decode_sequence == pytest.approx(3.0, rel=0.02)
    assert steps.costs.ms_per_decode_step + 8 * steps.costs.ms_per_decode_sequence == pytest.approx(44.0, rel=0.02)


def test_a_cost_is_never_negative(steps: Steps) -> None:
    for sequences, ms in ((1, 50.0), (20, 20.0), (1, 60.0), (20, 10.0)) * 5:
        steps.run(0, sequences, ms)
        assert steps.costs.ms_per_decode_step >= 0
        assert steps.costs.ms_per_decode_sequence >= 0


def test_it_says_by_how_large_steps_it_has_measured(steps: Steps) -> None:
    steps.run(100, 0, 100.0)
    steps.run(3, 4, 30.0)
    steps.run(0, 4, 30.0)
    assert steps.costs.tokens_per_prefill_step == 100.0
    for _ in range(100):
        steps.run(500, 2, 500.0)
    assert steps.costs.tokens_per_prefill_step == 500.0


@pytest.mark.parametrize("canary_ms", [prefill_ms(CANARY_TOKENS), 80.0])
def test_canaries_do_not_teach_what_a_long_prompt_takes(warm: Steps, canary_ms: float) -> None:
    """The processor is cold after a rest, so that they take longer than in a row."""
    for _ in range(200):
        warm.rest(20.0)
        warm.run(CANARY_TOKENS, 0, canary_ms)
        warm.run(0, 1, 12.0)
    assert warm.prompt_ms(2000) == pytest.approx(2000 / 512 * prefill_ms(512), rel=0.1)
    assert warm.costs.ms_per_decode_step == pytest.approx(11.0, abs=1.0)


@pytest.mark.parametrize("num_tokens", [CANARY_TOKENS, 100, WHOLE_STEP_TOKENS])
@pytest.mark.parametrize("before", [0, 1, 100])
@pytest.mark.parametrize("held_up", [True, False], ids=["known to be held up", "not known"])
def test_a_step_over_a_pause_does_not_teach_that_prompts_are_slow(
    warm: Steps, num_tokens: int, before: int, held_up: bool
) -> None:
    """A pause is told by the processor's time only on a CPU. Anywhere, a request is refused only if half of what it is
    reckoned to take does not fit."""
    for _ in range(before):
        warm.run(WHOLE_STEP_TOKENS, 0, prefill_ms(WHOLE_STEP_TOKENS))
    warm.run(num_tokens, 0, 12_000.0, held_up=held_up)
    most = 1.1 if held_up else 2.1
    assert warm.prompt_ms(2000) < most * 2000 / 512 * prefill_ms(512)


def test_what_was_observed_fades_to_what_the_start_has_shown(warm: Steps) -> None:
    for _ in range(100):
        warm.run(WHOLE_STEP_TOKENS, 0, 5 * prefill_ms(WHOLE_STEP_TOKENS))
        warm.run(0, 1, 60.0)
    assert warm.costs.ms_per_prefill_token > 4 * TOKEN_MS, "steps that are all slow are believed"
    warm.rest(600.0)
    assert warm.prompt_ms(512) == pytest.approx(prefill_ms(512), rel=0.05)
    assert warm.costs.ms_per_decode_step == pytest.approx(10.0, rel=0.05)


def test_steps_are_bounded_by_the_time_that_they_are_expected_to_take(warm: Steps) -> None:
    def within(ms: float) -> int | None:
        return warm.model.tokens_within(ms, warm.now)

    assert CostModel().tokens_within(1000.0, 0.0) is None
    assert within(FIXED_MS + 1000 * TOKEN_MS) == pytest.approx(1000, abs=1)
    assert within(1.0) == 16, "there is always a step"
    warm.run(256, 0, 10 * prefill_ms(256), held_up=True)
    assert within(10 * prefill_ms(200)) == pytest.approx(200, abs=1), "the next may be held up as much"
    warm.run(200, 0, prefill_ms(200))
    assert within(prefill_ms(200)) == pytest.approx(200, abs=1)
