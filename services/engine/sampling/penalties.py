"""Changes the logits of single tokens before sampling, by bias, penalties and masks.

Owns: their formulas and their order. Never: which tokens are masked (`masks` says it of constraints), or the choice of
a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.sampling.masks import NO_MASKS, Masks
from services.engine.schedule.constraint import Bits
from services.engine.schedule.sequence import SampleRow


def adjust(logits: Tensor, rows: Sequence[SampleRow], masks: Masks = NO_MASKS) -> None:
    """Changes the logits, [num_rows, vocab_size], in place; `rows` has one entry for each row.

    It adds the bias, applies the repetition penalty, subtracts the presence and frequency penalties as OpenAI's API
    defines them, and then sets masked tokens to -inf: what is not among the allowed tokens, stop tokens that may not
    come yet, tokens that would complete a bad word, and what a constraint does not allow.
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
        if sampling.allowed_token_ids:
            _keep_only(logits[at], sampling.allowed_token_ids)
        if masked := (*row.masked_token_ids, *row.barred_token_ids):
            logits[at, list(masked)] = -torch.inf
    if masks.bits is not None and masks.rows:
        _mask(logits, masks.rows, masks.bits)


def _keep_only(logits: Tensor, token_ids: Sequence[int]) -> None:
    index = torch.as_tensor(token_ids, device=logits.device)
    kept = logits[index]
    logits.fill_(-torch.inf)
    logits[index] = kept


def _mask(logits: Tensor, rows: Sequence[int], bits: Bits) -> None:
    """Sets the logits of the `rows` to -inf but for the tokens in `bits`, [len(rows), ceil(vocab_size / 32)]."""
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)
        for at, row in zip(rows, torch.from_numpy(~allowed), strict=True):
            logits[at].masked_fill_(row, -torch.inf)
        return
    words = torch.from_numpy(bits).to(logits.device, non_blocking=True)
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    masked = ((words[:, :, None] >> places) & 1).flatten(1)[:, :vocab_size] == 0
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill_(masked, -torch.inf)


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
