"""Chooses one token for each row of logits, by its sequence's parameters.

Sampling is Gumbel-max: the token with the largest (logit / temperature + noise) among those that the filters keep has
exactly the softmax distribution. Neither filters nor noise sort or take logarithms of the whole vocabulary: the best
few tokens decide nearly always, and bounds show when they do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine import noise
from services.engine.penalties import adjust
from services.engine.sequence import SampledToken, SamplingParams, ScheduledSequence

_NUM_CANDIDATES = 128
_LEAST_TEMPERATURE = 1e-30
"""Smaller ones are this: greedy in all but name, and no division by what float32 rounds to zero."""


@torch.inference_mode()
def sample(logits: Tensor, sequences: Sequence[ScheduledSequence]) -> list[SampledToken]:
    """logits: [len(sequences), vocab_size], of any float type; may be changed. Deterministic."""
    logits = logits.float()
    adjust(logits, sequences)
    drawn = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature > 0]
    if len(drawn) < len(sequences):
        token_ids = logits.argmax(-1)
    else:
        token_ids = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        token_ids[rows] = _draw(logits[rows], [sequences[row] for row in drawn])
    return _with_logprobs(logits, token_ids, sequences)


def _draw(logits: Tensor, sequences: Sequence[ScheduledSequence]) -> Tensor:
    """[num_rows] token ids. logits: [num_rows, vocab_size] float32; changed."""
    vocab_size = logits.shape[1]
    params = [sequence.sampling for sequence in sequences]
    temperatures = torch.tensor([max(each.temperature, _LEAST_TEMPERATURE) for each in params], device=logits.device)
    # Relative to the best, so that small temperatures do not overflow.
    scaled = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperatures[:, None])
    num_candidates = min(vocab_size, max(_NUM_CANDIDATES, *(each.top_k for each in params)))
    values, token_ids = scaled.topk(num_candidates)
    least = _least_kept(scaled, values, params)
    keys = noise.keys([(each.sampling.seed, each.position) for each in sequences], logits.device)
    scores = values + noise.gumbel(keys, token_ids)
    scores.masked_fill_(values < least[:, None], -torch.inf)
    best, place = scores.max(-1)
    chosen = token_ids.gather(-1, place[:, None])[:, 0]
    if num_candidates < vocab_size:
        # Tokens beyond the candidates have at most the last one's value; where the filters keep such ones, those with
        # enough noise to win are compared too.
        open_rows = (values[:, -1] >= least).nonzero()[:, 0]
        if len(open_rows):
            needed = best[open_rows] - values[open_rows, -1]
            contest = _contest(scaled[open_rows], least[open_rows], keys[:, open_rows], needed)
            chosen[open_rows] = torch.where(contest[0] > best[open_rows], contest[1], chosen[open_rows])
    return chosen


def _contest(scaled: Tensor, least: Tensor, keys: Tensor, needed: Tensor) -> tuple[Tensor, Tensor]:
    """(score, token id) of the best token among those with at least `needed` noise: [num_rows] each."""
    hashes = noise.hash_all(keys, scaled.shape[1])
    rows, token_ids = (hashes >= noise.least_hash(needed)[:, None]).nonzero(as_tuple=True)
    values = scaled[rows, token_ids]
    scores = values + noise.gumbel(keys[:, rows], token_ids)
    scores.masked_fill_(values < least[rows], -torch.inf)
    best = torch.full_like(needed, -torch.inf).scatter_reduce_(0, rows, scores, "amax")
    winners = scores == best[rows]
    chosen = torch.zeros_like(needed, dtype=torch.int64).scatter_(0, rows[winners], token_ids[winners])
    return best, chosen


def _least_kept(scaled: Tensor, values: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[num_rows]: the smallest scaled logit that top_k, then top_p among those, then min_p keep. Ties are kept.

    scaled: [num_rows, vocab_size], the best at 0; values: its largest, sorted.
    """
    device, vocab_size = scaled.device, scaled.shape[1]
    least = torch.full((len(params),), -torch.inf, device=device)
    top_k = torch.tensor([each.top_k if each.top_k < vocab_size else 0 for each in params], device=device)
    if top_k.any():
        edges = values.gather(-1, (top_k - 1).clamp(0)[:, None])[:, 0]
        least = torch.where(top_k > 0, edges, least)
    if any(each.top_p < 1 for each in params):
        top_p = torch.tensor([each.top_p for each in params], dtype=torch.float64, device=device)
        edges = _nucleus_edges(scaled, values, top_k, top_p)
        least = torch.where(top_p < 1, torch.maximum(least, edges), least)
    if any(each.min_p > 0 for each in params):
        edges = torch.tensor([each.min_p for each in params], device=device).log()
        least = torch.maximum(least, edges)
    return least


def _nucleus_edges(scaled: Tensor, values: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The value of the last token of the smallest set that reaches `top_p` (Holtzman et al., arXiv 1904.09751)."""
    excluded = (torch.arange(values.shape[1], device=values.device) >= top_k[:, None]) & (top_k[:, None] > 0)
    kept = values.double().masked_fill(excluded, -torch.inf)
    total = torch.where(top_k > 0, kept.logsumexp(-1), scaled.logsumexp(-1).double())
    reached = (kept - total[:, None]).exp().cumsum(-1)
    last = (reached < top_p[:, None]).sum(-1)
    edges = values.gather(-1, last.clamp(max=values.shape[1] - 1)[:, None])[:, 0]
    if values.shape[1] < scaled.shape[1]:
        for row in ((last == values.shape[1]) & (top_k == 0)).nonzero()[:, 0].tolist():
            edges[row] = _nucleus_edge(scaled[row], total[row], top_p[row])
    return edges


def _nucleus_edge(scaled: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    """The same for one row whose candidates were too few; total: the log of its sum."""
    # All tokens less likely than this together miss the last (1 - top_p).
    likely = scaled[scaled.double() >= total + ((1 - top_p) / len(scaled)).log()].sort(descending=True).values
    reached = (likely.double() - total).exp().cumsum(0)
    last = (reached < top_p).sum().clamp(max=len(likely) - 1)
    return likely[last]


def _with_logprobs(logits: Tensor, token_ids: Tensor, sequences: Sequence[ScheduledSequence]) -> list[SampledToken]:
    """Log-probabilities are of the adjusted logits, before temperature."""
    sampled = [SampledToken(token_id) for token_id in token_ids.tolist()]
    asked = [row for row, sequence in enumerate(sequences) if sequence.sampling.num_logprobs is not None]
    if not asked:
        return sampled
    rows = torch.tensor(asked, device=logits.device)
    logprobs = logits[rows].log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids[rows, None])[:, 0].tolist()
    most = max(sequences[row].sampling.num_logprobs or 0 for row in asked)
    values, ids = (part.tolist() for part in logprobs.topk(min(most, logprobs.shape[1])))
    for place, row in enumerate(asked):
        count = sequences[row].sampling.num_logprobs or 0
        top = tuple(zip(ids[place][:count], values[place][:count], strict=True))
        sampled[row] = SampledToken(sampled[row].token_id, chosen[place], top)
    return sampled
