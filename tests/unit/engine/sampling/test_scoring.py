"""Tests the log-probabilities of prompts' tokens against torch's own, whatever the slices."""

from __future__ import annotations

import pytest
import torch

from services.engine.sampling.scoring import score
from services.engine.schedule.sequence import PromptScoring, ScheduledSequence

VOCAB = 300


def part(seq_id: int, token_ids: tuple[int, ...], num_top: int) -> ScheduledSequence:
    return ScheduledSequence(seq_id, 0, token_ids, (0,), scoring=PromptScoring(1, token_ids, num_top))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 130])
def test_scores_are_those_of_the_distribution(num_tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = (torch.randn(num_tokens + 3, VOCAB, generator=generator) * 3).to(dtype)
    ids = tuple(torch.randint(VOCAB, (num_tokens,), generator=generator).tolist())
    before = logits.clone()
    scored = score(logits, [part(1, ids, 5), ScheduledSequence(2, 0, (3,), (0,)), part(3, (4, 5, 6), 0)])
    assert torch.equal(logits, before), "the sampler still needs them"
    assert scored.keys() == {1, 3}
    assert [len(scored[seq_id]) for seq_id in (1, 3)] == [num_tokens, 3]
    wanted = before.double().log_softmax(-1)
    for row, (token_id, found) in enumerate(zip(ids, scored[1], strict=True)):
        assert found.logprob == pytest.approx(wanted[row, token_id].item(), abs=1e-4)
        assert found.rank == 1 + int((before[row] > before[row, token_id]).sum())
        assert [logprob for _, logprob in found.top] == pytest.approx(wanted[row].topk(5).values.tolist(), abs=1e-4)
        assert all(wanted[row, id].item() == pytest.approx(logprob, abs=1e-4) for id, logprob in found.top)
        if found.rank == 1:
            assert found.top[0][1] == found.logprob
    assert [found.logprob for found in scored[3]] == pytest.approx(
        [wanted[num_tokens + at, token].item() for at, token in enumerate((4, 5, 6))], abs=1e-4
    )
    assert all(found.top == () for found in scored[3])


def test_a_vocabulary_may_be_smaller_than_what_is_asked_for() -> None:
    (found,) = score(torch.zeros(1, 3), [part(1, (2,), 20)])[1]
    assert len(found.top) == 3
    assert found.rank == 1
