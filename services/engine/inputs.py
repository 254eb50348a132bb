"""A step plan as flat tensors: every token of the step in one row."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from services.engine.sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Tensors are int64 on the device; sequences lie one after the other, in the plan's order."""

    token_ids: Tensor
    """[num_tokens]"""
    positions: Tensor
    """[num_tokens]: place in the sequence."""
    slot_blocks: Tensor
    """[num_tokens]: block that takes the token's key and value."""
    slot_offsets: Tensor
    """[num_tokens]: place in that block."""
    sample_rows: Tensor
    """[num_samples]: rows whose logits are wanted."""
    block_tables: tuple[tuple[int, ...], ...]
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    """Tokens of each sequence once the step is done."""
    partly_filled: tuple[int, ...]
    """Blocks that this step begins, and does not fill."""


def flatten(sequences: tuple[ScheduledSequence, ...], block_size: int, device: torch.device) -> StepInputs:
    tokens = list(chain.from_iterable(sequence.token_ids for sequence in sequences))
    positions: list[int] = []
    slots: list[int] = []
    sample_rows: list[int] = []
    for sequence in sequences:
        span = range(sequence.start, sequence.start + sequence.num_tokens)
        positions += span
        slots += [sequence.block_ids[position // block_size] for position in span]
        if sequence.samples:
            sample_rows.append(len(positions) - 1)
    table = torch.tensor([tokens, positions, slots], device=device)
    return StepInputs(
        token_ids=table[0],
        positions=table[1],
        slot_blocks=table[2],
        slot_offsets=table[1] % block_size,
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
        block_tables=tuple(sequence.block_ids for sequence in sequences),
        query_lens=tuple(sequence.num_tokens for sequence in sequences),
        context_lens=tuple(sequence.start + sequence.num_tokens for sequence in sequences),
        partly_filled=tuple(block for sequence in sequences for block in _partly_filled(sequence, block_size)),
    )


def _partly_filled(sequence: ScheduledSequence, block_size: int) -> tuple[int, ...]:
    end = sequence.start + sequence.num_tokens
    last = end // block_size
    return (sequence.block_ids[last],) if end % block_size and sequence.start <= last * block_size else ()
