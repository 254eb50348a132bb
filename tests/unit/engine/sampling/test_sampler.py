"""Tests the sampler against exact probabilities, parameter by parameter."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from services.engine.sampling import noise
from services.engine.sampling.sampler import sample
from services.engine.schedule.sequence import SampledToken, SampleRow, SamplingParams
from tests.support.distribution import assert_distribution

VOCAB = 500  # more than the sampler's candidates
NUM_DRAWS = 4000
_ROWS = 500


def row_of(
    position: int = 0, *, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **sampling: Any
) -> SampleRow:
    masked = sampling.pop("masked", ())
    return SampleRow(position, SamplingParams(**sampling), prompt, output, masked)


def random_logits(spread: float = 2.0, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draw(logits: torch.Tensor, count: int = NUM_DRAWS, **sampling: Any) -> Counter[int]:
    """Token counts of `count` draws at successive positions."""
    counts: Counter[int] = Counter()
    for start in range(0, count, _ROWS):
        rows = logits.repeat(_ROWS, 1)
        tokens = sample(rows, [row_of(start + place, **sampling) for place in range(_ROWS)])
        counts.update(token.token_id for token in tokens)
    return counts


def test_greedy_takes_the_largest_of_each_row() -> None:
    logits = torch.stack([random_logits(seed=seed) for seed in range(4)])
    expected = logits.argmax(-1).tolist()
    assert sample(logits, [row_of(temperature=0.0)] * 4) == [SampledToken(token) for token in expected]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_temperature(temperature: float, spread: float) -> None:
    logits = random_logits(spread)
    assert_distribution(draw(logits, temperature=temperature, seed=3), (logits / temperature).softmax(-1))


def test_tiny_and_huge_temperatures_are_safe() -> None:
    logits = random_logits()
    assert draw(logits, _ROWS, temperature=1e-30) == {logits.argmax().item(): _ROWS}
    assert len(draw(logits, _ROWS, temperature=100.0)) > 200


@pytest.mark.parametrize("top_k", [1, 5, 128, 300, VOCAB, 5000])
def test_top_k(top_k: int) -> None:
    logits = random_logits()
    allowed = logits.topk(min(top_k, VOCAB))
    exact = torch.zeros(VOCAB).scatter_(0, allowed.indices, allowed.values.softmax(-1))
    assert_distribution(draw(logits, top_k=top_k, seed=5), exact)


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered = probabilities.sort(descending=True)
    before = ordered.values.cumsum(0) - ordered.values
    kept = ordered.indices[before < top_p]
    exact = torch.zeros_like(probabilities)
    exact[kept] = probabilities[kept]
    return exact / exact.sum()


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.3, 3.0])  # many more than the candidates, and few
def test_top_p(top_p: float, spread: float) -> None:
    logits = random_logits(spread)
    assert_distribution(draw(logits, top_p=top_p, seed=7), nucleus(logits.softmax(-1), top_p))


def test_top_p_counts_among_the_top_k() -> None:
    logits = random_logits()
    allowed = logits.topk(20)
    exact = torch.zeros(VOCAB).scatter_(0, allowed.indices, allowed.values.softmax(-1))
    assert_distribution(draw(logits, top_k=20, top_p=0.7, seed=11), nucleus(exact, 0.7))


@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p(min_p: float) -> None:
    logits = random_logits()
    probabilities = logits.softmax(-1)
    exact = probabilities * (probabilities >= min_p * probabilities.max())
    assert_distribution(draw(logits, min_p=min_p, seed=13), exact / exact.sum())


def test_ties_at_an_edge_are_all_kept() -> None:
    logits = torch.zeros(VOCAB)
    assert len(draw(logits, top_k=3, seed=1)) > 450


def test_other_rows_do_not_matter() -> None:
    """Each row alone and in a batch of different parameters chooses the same."""
    variants = [
        {"temperature": 0.0},
        {"temperature": 1.3},
        {"top_p": 0.95},
        {"top_k": 300},
        {"top_k": 7, "top_p": 0.5},
        {"min_p": 0.05, "num_logprobs": 3},
        {"logit_bias": {5: 3.0}, "masked": (9,)},
    ]
    logits = torch.stack([random_logits(1.0, seed=seed) for seed in range(len(variants))])
    parts = [row_of(place, seed=place * 77, **variant) for place, variant in enumerate(variants)]
    together = sample(logits.clone(), parts)
    alone = [sample(logits[row : row + 1].clone(), [each])[0] for row, each in enumerate(parts)]
    assert [token.token_id for token in together] == [token.token_id for token in alone]


def test_seed_and_position_decide() -> None:
    logits = random_logits()

    def tokens(seed: int) -> list[int]:
        return [
            token.token_id for token in sample(logits.repeat(50, 1), [row_of(place, seed=seed) for place in range(50)])
        ]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert len(set(tokens(1))) > 10
    assert tokens((1 << 64) - 1) != tokens(0)


def test_penalties_change_only_what_was_seen() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0, 3.0]])
    sampling = {
        "temperature": 0.0,
        "repetition_penalty": 2.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_logprobs": 5,
    }
    (token,) = sample(logits.clone(), [row_of(prompt=(0, 1, 1), output=(2, 2), **sampling)])
    adjusted = torch.tensor([1.0, -4.0, 0.5 - 0.5 - 0.5, 0.0, 3.0])
    assert dict(token.top) == pytest.approx(dict(enumerate(adjusted.log_softmax(-1).tolist())), abs=1e-6)


def test_bias_comes_before_penalties() -> None:
    logits = torch.tensor([[1.0, 0.0]])
    sampling = {"temperature": 0.0, "repetition_penalty": 2.0, "logit_bias": {0: 3.0}, "num_logprobs": 2}
    (token,) = sample(logits.clone(), [row_of(prompt=(0,), **sampling)])
    assert dict(token.top) == pytest.approx(dict(enumerate(torch.tensor([2.0, 0.0]).log_softmax(-1).tolist())))


def test_masked_tokens_are_never_chosen() -> None:
    logits = random_logits()
    best = logits.argmax().item()
    (greedy,) = sample(logits.clone()[None], [row_of(temperature=0.0, masked=(best,))])
    assert greedy.token_id == logits.topk(2).indices[1]
    assert best not in draw(logits, 2000, masked=(best,), seed=2)


def test_logprobs_are_before_temperature() -> None:
    logits = random_logits()
    parts = [row_of(temperature=0.1, num_logprobs=4), row_of(num_logprobs=0), row_of(temperature=0.0)]
    four, none, without = sample(logits.repeat(3, 1), parts)
    logprobs = logits.log_softmax(-1)
    assert four.logprob == pytest.approx(logprobs[four.token_id].item())
    assert [token for token, _ in four.top] == logprobs.topk(4).indices.tolist()
    assert [value for _, value in four.top] == pytest.approx(logprobs.topk(4).values.tolist())
    assert (none.top, none.logprob) == ((), pytest.approx(logprobs[none.token_id].item()))
    assert (without.top, without.logprob) == ((), None)


def test_nan_logits_do_no_harm_to_other_rows() -> None:
    logits = torch.stack([torch.full((VOCAB,), torch.nan), random_logits()])
    broken, whole = sample(logits.clone(), [row_of(1), row_of(2)])
    assert 0 <= broken.token_id < VOCAB
    assert whole == sample(logits[1:].clone(), [row_of(2)])[0]


def test_bfloat16_logits() -> None:
    logits = random_logits().bfloat16()
    assert_distribution(draw(logits, seed=3), logits.float().softmax(-1))


def test_noise_is_pinned() -> None:
    """A change here changes what every seeded request answers, and breaks resuming across versions."""
    keys = noise.keys([(0, 0), (2**64 - 1, 12345)], torch.device("cpu"))
    tokens = torch.tensor([[0, 1, 49151], [0, 1, 49151]])
    pinned = [
        [0.6715245024171894, 1.791093659393487, 0.04111205518282012],
        [0.22268383311046983, -0.36192650147251115, 0.9846407949943304],
    ]
    assert noise.gumbel(keys, tokens).flatten().tolist() == pytest.approx([*pinned[0], *pinned[1]], abs=1e-12)
    whole = noise.hash_all(keys, 49152)
    assert len(set(whole[0].tolist())) == 49152


def test_noise_bound() -> None:
    keys = noise.keys([(1, 2)], torch.device("cpu"))
    tokens = torch.arange(100_000)[None]
    found, hashes = noise.gumbel(keys, tokens)[0], noise.hash_all(keys, 100_000)[0]
    for bound in (-2.0, 0.0, 3.0, 9.0):
        above = found >= bound
        assert (hashes[above] >= noise.least_hash(torch.tensor(bound))).all()
        assert above.float().mean().item() == pytest.approx(1 - math.exp(-math.exp(-bound)), abs=0.006)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_tokens_come_and_no_barred_one(temperature: float) -> None:
    logits = random_logits()
    order = logits.argsort(descending=True).tolist()
    sampling = SamplingParams(
        temperature=temperature, allowed_token_ids=(order[5], order[400], order[9]), num_logprobs=3
    )
    rows = [SampleRow(at, sampling, barred_token_ids=(order[5],)) for at in range(40)]
    found = sample(logits.repeat(40, 1), rows)
    assert {token.token_id for token in found} <= {order[9], order[400]}
    assert [logprob > -math.inf for _, logprob in found[0].top] == [True, True, False]
