"""Tests that a token which would complete a bad word is barred, from token 0 on and after a replay."""

from __future__ import annotations

import pytest

from services.engine.schedule.sequence import SamplingParams
from tests.support.scheduler_driver import SchedulerDriver

BAD = ((7,), (3, 4), (9, 3, 4, 5))


@pytest.mark.parametrize(
    ("output", "barred"),
    [((), (7,)), ((3,), (7, 4)), ((4, 3), (7, 4)), ((3, 8), (7,)), ((9, 3, 4), (7, 5)), ((3, 4), (7,))],
)
def test_what_would_complete_a_sequence_is_barred(output: tuple[int, ...], barred: tuple[int, ...]) -> None:
    assert SamplingParams(bad_token_ids=BAD).barred_after(output) == barred


def _barred(tokens: list[int], num_output: int) -> tuple[int, ...]:
    """Returns what is barred at the first step of a sequence of which the last `num_output` tokens are a replay's."""
    engine = SchedulerDriver(8, 16)
    sequence = engine.sequence(tokens, max_tokens=30)
    sequence.output_base, sequence.sampling = num_output, SamplingParams(bad_token_ids=BAD)
    engine.scheduler.add(sequence)
    (part,) = engine.begin().sequences
    engine.finish()
    engine.abort(sequence.seq_id)
    engine.assert_idle()
    return part.rows[0].barred_token_ids


def test_the_prompt_does_not_count_and_a_replays_output_does() -> None:
    assert _barred([1, 3], 0) == (7,)
    assert _barred([1, 3], 1) == (7, 4)
    assert _barred([1, 9, 3, 4], 3) == (7, 5)
