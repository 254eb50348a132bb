"""Turns a step plan into flat tensors, which have all tokens of the step one after the other, without padding.

Owns: the order of tokens in a step's tensors. Never: which tokens a step computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from services.engine.attention.paged import StepLayout
from services.engine.schedule.sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Keeps the tokens of one step, one sequence after the other in the plan's order. Tensors are int64 on the
    device."""

    token_ids: Tensor
    """Tokens to compute: [num_tokens]."""
    positions: Tensor
    """Each token's place in its sequence: [num_tokens]."""
    slot_blocks: Tensor
    """Block to which each token's key and value are written: [num_tokens]."""
    slot_offsets: Tensor
    """Each token's place in that block: [num_tokens]."""
    logit_rows: Tensor
    """Rows whose logits are wanted: [num_rows]. First the last token of each sequence that samples, in the plan's
    order, then those that score prompts, in the order of its `ScheduledSequence.scoring`."""


@dataclass(frozen=True, slots=True)
class StepInputs(StepTokens):
    """Keeps the inputs of one step: its tokens, and how its sequences lie in the pool."""

    layout: StepLayout
    """Lengths and blocks of the sequences, for attention."""


def flatten(sequences: tuple[ScheduledSequence, ...], block_size: int, device: torch.device) -> StepInputs:
    """Returns the inputs of a step that runs these sequences; tensors are made on `device`."""
    tokens = list(chain.from_iterable(sequence.token_ids for sequence in sequences))
    positions: list[int] = []
    slots: list[int] = []
    sampled_rows: list[int] = []
    scoring_rows: list[int] = []
    for sequence in sequences:
        span = range(sequence.start, sequence.start + sequence.num_tokens)
        if sequence.scoring is not None:
            first = len(positions) + sequence.scoring.position - 1 - sequence.start
            scoring_rows += range(first, first + len(sequence.scoring.token_ids))
        positions += span
        slots += [sequence.block_ids[position // block_size] for position in span]
        if sequence.rows:
            sampled_rows.append(len(positions) - 1)
    table = torch.tensor([tokens, positions, slots], device=device)
    return StepInputs(
        token_ids=table[0],
        positions=table[1],
        slot_blocks=table[2],
        slot_offsets=table[1] % block_size,
        logit_rows=torch.tensor(sampled_rows + scoring_rows, dtype=torch.int64, device=device),
        layout=StepLayout(
            block_tables=tuple(sequence.block_ids for sequence in sequences),
            query_lens=tuple(sequence.num_tokens for sequence in sequences),
            context_lens=tuple(sequence.start + sequence.num_tokens for sequence in sequences),
        ),
    )


def partly_filled(sequences: tuple[ScheduledSequence, ...], block_size: int) -> tuple[int, ...]:
    """Returns the blocks whose first slot a step of these sequences writes, and whose last it does not."""
    return tuple(block for sequence in sequences for block in _partly_filled(sequence, block_size))


def _partly_filled(sequence: ScheduledSequence, block_size: int) -> tuple[int, ...]:
    end = sequence.start + sequence.num_tokens
    last = end // block_size
    return (sequence.block_ids[last],) if end % block_size and sequence.start <= last * block_size else ()
