"""Compares greedy output with transformers' own, token for token.

Batching changes the order of float sums, so a differing token is accepted where the reference's logits of the two
candidates are closer than a bound; the rest of that output is then not comparable, and the case is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.engine.sampling import noise
from services.engine.schedule.constraint import num_words
from services.worker.grammar import Matcher, Vocabulary, compile_grammar, grammar_of
from tests.support.patience import Wrong

# A busy machine makes threads wait for each other.
torch.set_num_threads(1)

GAP_BOUND = 1e-3
"""Logits, in float32. Observed rounding differences stay below 1e-4."""


class GreedyReference:
    """Runs transformers' `generate` in float32 with its plain attention."""

    def __init__(self, directory: Path, gap_bound: float = GAP_BOUND) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        self.gap_bound = gap_bound
        self._directory = directory
        self._compiled: dict[str, Matcher] = {}
        """By regular expression."""
        self.num_compared = 0
        """Tokens that were equal."""
        self.num_near_ties = 0
        """Outputs whose comparison ended at a near-tie, and tokens of one that `check_at_once` passed over."""

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Returns exactly max_tokens tokens, whether there is an end-of-sequence among them or not."""
        with torch.inference_mode():
            tokens = torch.tensor([list(prompt)])
            output = self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        generated: list[int] = output[0, len(prompt) :].tolist()
        return generated

    def check(self, prompt: Sequence[int], found: Sequence[int], expected: Sequence[int] | None = None) -> None:
        """Asserts that `found` is the greedy continuation. expected: of at least its length, if computed before."""
        if expected is None:
            expected = self.generate(prompt, len(found))
        assert len(expected) >= len(found)
        for position, (token, wanted) in enumerate(zip(found, expected, strict=False)):
            if token != wanted:
                gap = self._gap([*prompt, *expected[:position]], wanted, token)
                if gap >= self.gap_bound:
                    raise Wrong(f"position {position}: {token} instead of {wanted}, {gap:.2g} below it")
                self.num_near_ties += 1
                return
            self.num_compared += 1

    @torch.inference_mode()
    def check_at_once(
        self, prompt: Sequence[int], found: Sequence[int], *, seed: int | None = None, pattern: str = ""
    ) -> None:
        """Does what `check` does in a single pass: each token is the best after those before it, or nearly so.
        Near-ties are passed over and counted, so the whole output is checked. `seed` is the one it was sampled with, at
        temperature 1; `pattern` is the regular expression that it was held to."""
        tokens = torch.tensor([[*prompt, *found[:-1]]])
        scores = self.model(tokens, use_cache=False).logits[0, len(prompt) - 1 :].double()
        if seed is not None:
            keys = noise.keys([(seed, position) for position in range(len(found))], scores.device)
            scores += noise.gumbel(keys, torch.arange(scores.shape[1]).expand(len(found), -1))
        if pattern:
            scores.masked_fill_(self._forbidden_by(pattern, found), -torch.inf)
        chosen = scores.gather(-1, torch.tensor(found)[:, None])[:, 0]
        gaps = (scores.max(-1).values - chosen).tolist()
        for position, (token, gap) in enumerate(zip(found, gaps, strict=True)):
            assert gap < self.gap_bound, f"position {position}: {token} is {gap:.2g} below the best"
            self.num_near_ties += gap > 0
            self.num_compared += gap == 0

    def _forbidden_by(self, pattern: str, found: Sequence[int]) -> Tensor:
        """Returns which tokens may not come at each place: [len(found), vocab_size]."""
        vocab_size = self.model.config.vocab_size
        if pattern not in self._compiled:
            vocabulary = Vocabulary(self._directory, vocab_size, [self.model.generation_config.eos_token_id[0]])
            self._compiled[pattern] = compile_grammar(vocabulary, grammar_of("regex", pattern))
        matcher = self._compiled[pattern].copy()
        bits = np.zeros((len(found), num_words(vocab_size)), np.int32)
        for row, token_id in zip(bits, found, strict=True):
            matcher.fill(row)
            matcher.take([token_id])
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(allowed) == 0

    @torch.inference_mode()
    def _gap(self, context: Sequence[int], wanted: int, token: int) -> float:
        logits = self.model(torch.tensor([list(context)]), use_cache=False).logits[0, -1]
        return (logits[wanted] - logits[token]).item()
