"""Tests which tokens the rows of constrained sequences may have, and that they get no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from services.core.errors import BatonError, ConstraintUnsatisfied, InvalidRequest
from services.engine.sampling.masks import Masks, masks_of
from services.engine.sampling.sampler import sample
from services.engine.schedule.constraint import Bits
from services.engine.schedule.sequence import SampleRow, SamplingParams, ScheduledSequence
from tests.support.scripted_constraint import OneOf

VOCAB = 70  # no whole number of words
EOS, STOP = 2, 40
GREEDY = SamplingParams(temperature=0.0)


def part(
    seq_id: int,
    constraint: Any,
    *,
    untold: tuple[int, ...] = (),
    stops: tuple[int, ...] = (EOS,),
    min_tokens: int = 0,
    num_answers: int = 1,
) -> ScheduledSequence:
    rows = (SampleRow(0, GREEDY, masked_token_ids=stops if min_tokens else ()),) * num_answers
    return ScheduledSequence(
        seq_id, 10, (5,), (0,), rows, constraint=constraint, untold_token_ids=untold, stop_token_ids=stops
    )


def tokens_in(masks: Masks) -> list[list[int]]:
    assert masks.bits is not None
    unpacked = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in unpacked]


def test_each_row_of_a_constrained_part_has_its_tokens() -> None:
    free = part(1, None)
    one = part(2, OneOf([[7, 8], [7, 9], [69]]))
    other = part(3, OneOf([[7, 8], [7, 9]]), untold=(7,))
    masks = masks_of([one, free, other], VOCAB)
    assert masks.rows == (0, 2)
    assert tokens_in(masks) == [[7, 69], [8, 9]]
    assert not masks.failed


def test_tokens_that_end_the_output_are_allowed_exactly_where_it_may_end() -> None:
    lists = [[7, STOP, 8], [7]]
    stops = (EOS, STOP)
    assert tokens_in(masks_of([part(1, OneOf(lists), stops=stops)], VOCAB)) == [[7]]
    assert tokens_in(masks_of([part(1, OneOf(lists), untold=(7,), stops=stops)], VOCAB)) == [[EOS, STOP]]
    # STOP could follow, as text, but a stop token is never text; so it is not allowed before the output is complete.
    masks = masks_of([part(1, OneOf([[STOP], [9]]), stops=stops)], VOCAB)
    assert tokens_in(masks) == [[9]]


@pytest.mark.parametrize(
    ("constrained", "words"),
    [
        (part(1, OneOf([[7]]), untold=(7,), min_tokens=1), "min_tokens"),
        (part(1, OneOf([[7]]), untold=(7,), stops=()), "ignore_eos"),
        (part(1, OneOf([[STOP, 9]]), stops=(STOP,)), "stop tokens"),
    ],
)
def test_a_part_with_nothing_left_fails_alone(constrained: ScheduledSequence, words: str) -> None:
    masks = masks_of([constrained, part(2, OneOf([[6]]))], VOCAB)
    assert isinstance(masks.failed[1], ConstraintUnsatisfied)
    assert words in str(masks.failed[1])
    assert (tokens_in(masks), masks.rows) == ([[6]], (1,))


def test_further_answers_begin_where_the_first_does() -> None:
    masks = masks_of([part(1, OneOf([[7], [8]]), num_answers=3), part(2, OneOf([[6]]))], VOCAB)
    assert (tokens_in(masks), masks.rows) == ([[7, 8], [7, 8], [7, 8], [6]], (0, 1, 2, 3))


class Broken:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def take(self, token_ids: Sequence[int]) -> None:
        pass

    def fill(self, bits: Bits) -> bool:
        bits[:] = -1
        raise self._error


def test_a_constraint_that_fails_ends_its_own_sequence_only() -> None:
    too_complex = InvalidRequest("constraint", "is too complex")
    masks = masks_of([part(1, Broken(too_complex)), part(2, OneOf([[6]])), part(3, Broken(KeyError("x")))], VOCAB)
    assert masks.failed[1] is too_complex
    assert type(masks.failed[3]) is BatonError, "a defect is opaque"
    assert (tokens_in(masks), masks.rows) == ([[6]], (1,))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampled_tokens_are_allowed_ones_and_other_rows_are_as_before(temperature: float) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    sampling = SamplingParams(temperature=temperature, seed=5, num_logprobs=3)
    rows = [SampleRow(at, sampling) for at in range(3)]
    free = sample(logits.clone(), rows)
    masks = masks_of([part(1, None), part(2, OneOf([[68], [33]])), part(3, None)], VOCAB)
    found = sample(logits.clone(), rows, masks)
    assert [found[0], found[2]] == [free[0], free[2]]
    assert found[1].token_id in (33, 68)
    # Log-probabilities are those of the masked distribution.
    expected = logits[1, [33, 68]].log_softmax(-1)
    assert found[1].logprob == pytest.approx(expected[0 if found[1].token_id == 33 else 1].item(), abs=1e-5)
    assert {token_id for token_id, logprob in found[1].top if logprob > -np.inf} == {33, 68}


def test_masks_come_after_biases_and_penalties() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 5.0
    sampling = SamplingParams(temperature=0.0, logit_bias={9: 100.0, 7: 1.0})
    masks = masks_of([part(1, OneOf([[7], [8]]))], VOCAB)
    assert sample(logits, [SampleRow(0, sampling)], masks)[0].token_id == 7


def test_a_bias_forbids_nothing() -> None:
    """The lowest bias is finite, so what alone is left is chosen in spite of it."""
    sampling = SamplingParams(temperature=0.7, logit_bias={7: -100.0}, top_p=0.1, min_p=0.5)
    masks = masks_of([part(1, OneOf([[7]]))], VOCAB)
    assert sample(torch.randn(1, VOCAB), [SampleRow(0, sampling)], masks)[0].token_id == 7


def test_a_constraint_keeps_to_allowed_tokens_and_bad_words() -> None:
    sampling = SamplingParams(allowed_token_ids=(7, 8, 68))

    def limited(*lists: list[int], barred: tuple[int, ...] = ()) -> ScheduledSequence:
        row = SampleRow(0, sampling, barred_token_ids=barred)
        return dataclasses.replace(part(1, OneOf(list(lists))), rows=(row,))

    assert tokens_in(masks_of([limited([7], [8], [9])], VOCAB)) == [[7, 8]]
    assert tokens_in(masks_of([limited([7], [8], [9], barred=(8,))], VOCAB)) == [[7]]
    failed = masks_of([limited([9])], VOCAB).failed[1]
    assert isinstance(failed, ConstraintUnsatisfied)
    assert "allowed_token_ids" in str(failed)
