"""Changes the logits of single tokens before sampling, by bias, penalties and masks.

Owns: their formulas and their order. Never: which tokens are masked, or the choice of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.schedule.sequence import SampleRow


def adjust(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Changes the logits, [num_rows, vocab_size], in place; `rows` has one entry for each row.

    It adds the bias, applies the repetition penalty, subtracts the presence and frequency penalties as OpenAI's API
    defines them, and then sets masked tokens to -inf.
    """
    for at, row in enumerate(rows):
        sampling = row.sampling
        if sampling.logit_bias:
            _add(logits[at], list(sampling.logit_bias), list(sampling.logit_bias.values()))
        if sampling.repetition_penalty != 1.0:
            _penalise_repetition(logits[at], row)
        if row.output_token_ids and (sampling.presence_penalty or sampling.frequency_penalty):
            seen, counts = np.unique(np.array(row.output_token_ids), return_counts=True)
            _add(logits[at], seen, -sampling.presence_penalty - sampling.frequency_penalty * counts)
        if row.masked_token_ids:
            logits[at, list(row.masked_token_ids)] = -torch.inf


def _add(logits: Tensor, token_ids: Sequence[int] | np.ndarray, amounts: Sequence[float] | np.ndarray) -> None:
    index = torch.as_tensor(token_ids, device=logits.device)
    logits.index_add_(0, index, torch.as_tensor(amounts, dtype=logits.dtype, device=logits.device))


def _penalise_repetition(logits: Tensor, row: SampleRow) -> None:
    """Applies the repetition penalty of Keskar et al., CTRL (arXiv 1909.05858), in place.

    Positive logits are divided by it and others multiplied, so that a penalty above 1 always lowers the logit.
    """
    penalty = row.sampling.repetition_penalty
    seen = np.unique(np.array(row.prompt_token_ids + row.output_token_ids))
    index = torch.as_tensor(seen, device=logits.device)
    chosen = logits[index]
    logits[index] = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
