"""Chooses one token for each row of logits.

It samples with the Gumbel-max trick (see Maddison et al., arXiv 1411.0030): the token with the largest (logit /
temperature + Gumbel noise) among those that the filters keep is distributed exactly as their softmax. The filters do
not sort the whole vocabulary, and noise is not computed for all of it: nearly always only the tokens with the largest
logits matter, and bounds show when that is so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.sampling import noise
from services.engine.sampling.masks import NO_MASKS, Masks
from services.engine.sampling.penalties import adjust
from services.engine.schedule.sequence import SampledToken, SampleRow, SamplingParams

_NUM_CANDIDATES = 128
"""Tokens with the largest logits whose noise is always computed; more if top_k keeps more."""
_LEAST_TEMPERATURE = 1e-30
"""Smallest temperature that is used; smaller ones above 0 are raised to it. Its effect is that of greedy sampling, and
float32 does not round it to 0."""


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SampleRow], masks: Masks = NO_MASKS) -> list[SampledToken]:
    """Returns one token for each row: with temperature 0 the one with the largest logit, else one drawn at random.

    logits: [len(rows), vocab_size] of any float type; they may be changed. The result is a function of the arguments.
    Rows for which `masks` has no token are sampled as if they were free; the caller drops what they bring.
    """
    logits = logits.float()
    adjust(logits, rows, masks)
    drawn = [at for at, row in enumerate(rows) if row.sampling.temperature > 0]
    if len(drawn) < len(rows):
        token_ids = _best(logits)
    else:
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        token_ids[index] = _draw(logits[index], [rows[at] for at in drawn])
    return _with_logprobs(logits, token_ids, rows)


def _best(logits: Tensor) -> Tensor:
    """Returns the token with the largest logit of each row, the first of several: [num_rows]."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    # NumPy compares whole vectors, where torch compares number by number.
    return torch.from_numpy(logits.numpy().argmax(-1))


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Returns token ids drawn at random, [num_rows]. logits: [num_rows, vocab_size] float32; they are changed."""
    vocab_size = logits.shape[1]
    params = [row.sampling for row in rows]
    temperatures = torch.tensor([max(each.temperature, _LEAST_TEMPERATURE) for each in params], device=logits.device)
    # The largest logit is subtracted first, so that division by a small temperature cannot overflow to +inf.
    scaled = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperatures[:, None])
    num_candidates = min(vocab_size, max(_NUM_CANDIDATES, *(each.top_k for each in params)))
    values, token_ids = scaled.topk(num_candidates)
    least = _least_kept(scaled, values, params)
    keys = noise.keys([(row.sampling.seed, row.position) for row in rows], logits.device)
    scores = values + noise.gumbel(keys, token_ids)
    scores.masked_fill_(values < least[:, None], -torch.inf)
    best, place = scores.max(-1)
    chosen = token_ids.gather(-1, place[:, None])[:, 0]
    if num_candidates < vocab_size:
        # A token that is no candidate has at most the value of the last candidate. Where the filters keep such tokens,
        # those whose noise is large enough to win are compared too.
        # Where fewer tokens than candidates are allowed, the last candidate is a masked one.
        open_rows = ((values[:, -1] >= least) & (values[:, -1] > -torch.inf)).nonzero()[:, 0]
        if len(open_rows):
            needed = best[open_rows] - values[open_rows, -1]
            rival = _best_with_noise(scaled[open_rows], least[open_rows], keys[:, open_rows], needed)
            chosen[open_rows] = torch.where(rival[0] > best[open_rows], rival[1], chosen[open_rows])
    return chosen


def _best_with_noise(scaled: Tensor, least: Tensor, keys: Tensor, needed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the best score, and its token id, among the tokens whose noise is at least `needed`: [num_rows] each.

    scaled: [num_rows, vocab_size]; least, needed: [num_rows]; keys: [2, num_rows]. A row without such tokens has the
    score -inf.
    """
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
    """Returns the smallest scaled logit that top_k, top_p among the tokens of top_k, and min_p keep: [num_rows].

    Tokens that tie with it are kept. min_p (Nguyen et al., arXiv 2407.01082) is relative to the largest probability.
    scaled: [num_rows, vocab_size], the largest of each row 0; values: [num_rows, num_candidates], the largest, sorted.
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
    """Returns the smallest scaled logit of the nucleus: the fewest tokens that together reach `top_p`: [num_rows].

    This is nucleus sampling (Holtzman et al., arXiv 1904.09751). top_k, top_p: [num_rows]; a top_k of 0 keeps all.
    """
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
    """Returns the smallest scaled logit of the nucleus of one row, [vocab_size], whose candidates do not reach `top_p`.

    total: the logsumexp of the row.
    """
    # Tokens left out here have together a probability below 1 - top_p, so the others reach top_p.
    likely = scaled[scaled.double() >= total + ((1 - top_p) / len(scaled)).log()].sort(descending=True).values
    reached = (likely.double() - total).exp().cumsum(0)
    last = (reached < top_p).sum().clamp(max=len(likely) - 1)
    return likely[last]


def _with_logprobs(logits: Tensor, token_ids: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """Returns the tokens, with log-probabilities for the rows that asked for them. The probabilities are those of the
    adjusted logits, before temperature."""
    sampled = [SampledToken(token_id) for token_id in token_ids.tolist()]
    asked = [at for at, row in enumerate(rows) if row.sampling.num_logprobs is not None]
    if not asked:
        return sampled
    index = torch.tensor(asked, device=logits.device)
    logprobs = logits[index].log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids[index, None])[:, 0].tolist()
    most = max(rows[at].sampling.num_logprobs or 0 for at in asked)
    values, ids = (part.tolist() for part in logprobs.topk(min(most, logprobs.shape[1])))
    for place, at in enumerate(asked):
        count = rows[at].sampling.num_logprobs or 0
        top = tuple(zip(ids[place][:count], values[place][:count], strict=True))
        sampled[at] = SampledToken(sampled[at].token_id, chosen[place], top)
    return sampled
