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


def test_decodes_in_a_prefill_step_are_not_charged_to_it() -> None:
    costs = CostModel()
    costs.observe(0, 4, 30.0)
    costs.observe(100, 4, 230.0)
    assert costs.ms_per_prefill_token == 2.0


def test_a_few_prompt_tokens_say_nothing() -> None:
    costs = CostModel()
    costs.observe(3, 4, 30.0)
    assert costs.ms_per_prefill_token == 0.0
