"""Tests what a worker learns of the costs of its steps."""

from __future__ import annotations

import pytest

from services.engine.cost_model import CostModel


def test_costs_follow_the_steps() -> None:
    costs = CostModel()
    assert (costs.ms_per_prefill_token, costs.ms_per_decode_step) == (0.0, 0.0)
    costs.observe(100, 0, 200.0)
    costs.observe(0, 4, 30.0)
    assert (costs.ms_per_prefill_token, costs.ms_per_decode_step) == (2.0, 30.0)
    for _ in range(100):
        costs.observe(100, 0, 100.0)
        costs.observe(0, 4, 60.0)
    assert costs.ms_per_prefill_token == pytest.approx(1.0, rel=1e-3)
    assert costs.ms_per_decode_step == pytest.approx(60.0, rel=1e-3)


def test_further_prompt_tokens_are_told_from_the_step_itself() -> None:
    costs = CostModel()
    assert costs.ms_per_further_prefill_token == 0.0
    costs.observe(100, 0, 5.0 + 100 * 0.05)
    assert costs.ms_per_further_prefill_token == pytest.approx(0.1), "its share, as long as nothing else is known"
    for number in range(60):
        tokens = 32 + 16 * (number % 20)
        costs.observe(tokens, 0, 5.0 + tokens * 0.05)
    assert costs.ms_per_further_prefill_token == pytest.approx(0.05, rel=0.02)
    assert costs.ms_per_prefill_token > 0.06


def test_decodes_in_a_prefill_step_are_not_charged_to_it() -> None:
    costs = CostModel()
    costs.observe(0, 4, 30.0)
    costs.observe(100, 4, 230.0)
    assert costs.ms_per_prefill_token == 2.0


def test_a_few_prompt_tokens_say_nothing() -> None:
    costs = CostModel()
    costs.observe(3, 4, 30.0)
    assert costs.ms_per_prefill_token == 0.0


def test_further_sequences_are_told_from_the_step_itself() -> None:
    costs = CostModel()
    for number in range(60):
        sequences = 1 + number % 9
        costs.observe(0, sequences, 20.0 + 3.0 * (sequences - 1))
    assert costs.ms_per_decode_step == pytest.approx(20.0, rel=0.02)
    assert costs.ms_per_decode_sequence == pytest.approx(3.0, rel=0.02)
    for _ in range(200):  # the same number for long says nothing new about it
        costs.observe(0, 9, 44.0)
    assert costs.ms_per_decode_sequence == pytest.approx(3.0, rel=0.02)
    assert costs.ms_per_decode_step + 8 * costs.ms_per_decode_sequence == pytest.approx(44.0, rel=0.02)


def test_a_cost_is_never_negative() -> None:
    costs = CostModel()
    for sequences, ms in ((1, 50.0), (20, 20.0), (1, 60.0), (20, 10.0)) * 5:
        costs.observe(0, sequences, ms)
        assert costs.ms_per_decode_step >= 0
        assert costs.ms_per_decode_sequence >= 0


def test_it_says_by_how_many_steps_and_how_large_ones_it_has_measured() -> None:
    costs = CostModel()
    costs.observe(100, 0, 100.0)
    costs.observe(3, 4, 30.0)
    costs.observe(0, 4, 30.0)
    assert (costs.num_prefill_steps, costs.num_decode_steps, costs.tokens_per_prefill_step) == (1, 1, 100.0)
    for _ in range(100):
        costs.observe(500, 2, 500.0)
    assert (costs.num_prefill_steps, costs.num_decode_steps) == (101, 1)
    assert costs.tokens_per_prefill_step == pytest.approx(500.0, rel=1e-3)
