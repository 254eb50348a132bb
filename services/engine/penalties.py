"""Changes to single logits before sampling: bias, penalties, masked ids. Touches only the tokens concerned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.sequence import ScheduledSequence


def adjust(logits: Tensor, sequences: Sequence[ScheduledSequence]) -> None:
    """In place: bias, then repetition, then presence and frequency, then masks. logits: [num_rows, vocab_size]."""
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        if sampling.logit_bias:
            _add(logits[row], list(sampling.logit_bias), list(sampling.logit_bias.values()))
        if sampling.repetition_penalty != 1.0:
            _repel(logits[row], sequence)
        if sequence.output_token_ids and (sampling.presence_penalty or sampling.frequency_penalty):
            seen, counts = np.unique(np.array(sequence.output_token_ids), return_counts=True)
            _add(logits[row], seen, -sampling.presence_penalty - sampling.frequency_penalty * counts)
        if sequence.masked_token_ids:
            logits[row, list(sequence.masked_token_ids)] = -torch.inf


def _add(logits: Tensor, token_ids: Sequence[int] | np.ndarray, amounts: Sequence[float] | np.ndarray) -> None:
    index = torch.as_tensor(token_ids, device=logits.device)
    logits.index_add_(0, index, torch.as_tensor(amounts, dtype=logits.dtype, device=logits.device))


def _repel(logits: Tensor, sequence: ScheduledSequence) -> None:
    """Keskar et al., CTRL (arXiv 1909.05858), with the sign handled: a penalty above 1 always lowers the logit."""
    penalty = sequence.sampling.repetition_penalty
    seen = np.unique(np.array(sequence.prompt_token_ids + sequence.output_token_ids))
    index = torch.as_tensor(seen, device=logits.device)
    chosen = logits[index]
    logits[index] = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
