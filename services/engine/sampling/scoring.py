"""Computes the log-probabilities of prompts' own tokens, from the logits of the tokens before them.

They are the model's own distribution: no penalty, bias, mask or temperature changes it. Never: which tokens a step
scores (`schedule.step`), or samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from services.engine.schedule.sequence import PromptScoring, ScheduledSequence, ScoredToken

_ROWS = 64
"""Rows that are made float32 and normalised at a time: 40 MB for a vocabulary of 150,000."""


@torch.inference_mode()
def score(logits: Tensor, parts: Iterable[ScheduledSequence]) -> dict[int, tuple[ScoredToken, ...]]:
    """Returns what the `scoring` of each part asks for, by seq_id.

    logits: [num_scored, vocab_size] of any float type, of the tokens before those that are scored, in the parts' order.
    They are not changed.
    """
    scored, row = {}, 0
    for part in parts:
        if part.scoring is not None:
            num_rows = len(part.scoring.token_ids)
            scored[part.seq_id] = tuple(_score(logits[row : row + num_rows], part.scoring))
            row += num_rows
    return scored


def _score(logits: Tensor, scoring: PromptScoring) -> Iterator[ScoredToken]:
    for start in range(0, len(logits), _ROWS):
        logprobs = logits[start : start + _ROWS].float().log_softmax(-1)
        ids = torch.tensor(scoring.token_ids[start : start + _ROWS], device=logits.device)
        chosen = logprobs.gather(-1, ids[:, None])
        ranks = (logprobs > chosen).sum(-1).add_(1).tolist()
        values, top_ids = (part.tolist() for part in logprobs.topk(min(scoring.num_top, logprobs.shape[1])))
        for at, logprob in enumerate(chosen[:, 0].tolist()):
            yield ScoredToken(logprob, ranks[at], tuple(zip(top_ids[at], values[at], strict=True)))
