"""Tests that a plan becomes flat tensors."""

from __future__ import annotations

import torch

from services.engine.attention.paged import StepLayout
from services.engine.model.inputs import flatten, partly_filled
from services.engine.schedule.sequence import SampleRow, SamplingParams, ScheduledSequence


def part(start: int, tokens: tuple[int, ...], blocks: tuple[int, ...], num_rows: int = 1) -> ScheduledSequence:
    rows = tuple(SampleRow(position, SamplingParams()) for position in range(num_rows))
    return ScheduledSequence(0, start, tokens, blocks, rows)


def test_sequences_lie_one_after_the_other() -> None:
    parts = (part(5, (50,), (9, 2)), part(2, (32, 33, 34), (4, 7), num_rows=0), part(0, (40, 41), (1,)))
    inputs = flatten(parts, 4, torch.device("cpu"))
    assert inputs.token_ids.tolist() == [50, 32, 33, 34, 40, 41]
    assert inputs.positions.tolist() == [5, 2, 3, 4, 0, 1]
    assert inputs.slot_blocks.tolist() == [2, 4, 4, 7, 1, 1]
    assert inputs.slot_offsets.tolist() == [1, 2, 3, 0, 0, 1]
    assert inputs.logit_rows.tolist() == [0, 5]
    assert inputs.layout == StepLayout(((9, 2), (4, 7), (1,)), query_lens=(1, 3, 2), context_lens=(6, 5, 2))
    assert inputs.layout.only((0, 2)) == StepLayout(((9, 2), (1,)), query_lens=(1, 2), context_lens=(6, 2))


def test_all_answers_are_sampled_from_the_last_token() -> None:
    inputs = flatten((part(5, (50, 60, 70), (9, 2), num_rows=3), part(0, (40, 41), (1,))), 4, torch.device("cpu"))
    assert inputs.logit_rows.tolist() == [2, 4]


def test_blocks_begun_and_not_filled() -> None:
    def partly(start: int, count: int) -> tuple[int, ...]:
        return partly_filled((part(start, (0,) * count, (10, 11, 12)),), 4)

    assert partly(0, 1) == (10,)
    assert partly(1, 2) == ()
    assert partly(0, 4) == ()
    assert partly(3, 1) == ()
    assert partly(4, 1) == (11,)
    assert partly(2, 7) == (12,)
    assert partly(5, 2) == ()
