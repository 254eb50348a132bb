"""Tests that a model whose every layer attends to a window is refused, since vLLM keeps only the window's blocks, and
that it is run within its window where that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.core.errors import UnsupportedModel
from tests.support.equality import GreedyReference
from tests.support.vllm_driver import BLOCK, VllmDriver, config_of, load, tiny_for_vllm

pytestmark = pytest.mark.timeout(300)

WINDOW = 3 * BLOCK
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    windowed = {"model_type": "mistral", "sliding_window": WINDOW}
    return tiny_for_vllm(tmp_path_factory.mktemp("models"), num_hidden_layers=2, **windowed)


def test_it_is_refused_by_the_kind_of_its_cache(model: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"KV as SlidingWindowSpec.*disable_sliding_window=true"):
        load(config_of(model))


def test_within_its_window_a_split_answer_is_that_of_the_model(model: Path) -> None:
    within = load(config_of(model, max_model_len=WINDOW), disable_sliding_window="true")
    with VllmDriver(within) as driver:
        prompt = [(at * 37) % 300 + 3 for at in range(BLOCK + 7)]
        first, rest = driver.split(prompt, NUM_TOKENS, salt="prefill", decode_salt="decode")
        assert rest.error is None
        GreedyReference(model).check_at_once(prompt, first.token_ids + rest.token_ids)
