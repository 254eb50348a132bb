"""Samples in vLLM as the torch engine does, so that a replay goes on as if nothing had happened.

It is a logits processor of vLLM's first model runner. It applies the whole chain of `services.engine.sampling`: biases,
penalties, temperature, filters, and noise by seed, output position and token id. vLLM is told temperature 0, and gets
logits of which all but the chosen token's are -inf. Output positions count from the original prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor.interface import LogitsProcessor, MoveDirectionality

from services.engine.sampling.sampler import sample
from services.engine.schedule.sequence import SampledToken, SampleRow, SamplingParams
from services.vllm import messages
from services.vllm.inside import connector


class _Row(NamedTuple):
    seq_id: int
    sampling: SamplingParams
    further: list[SamplingParams]
    num_prompt: int
    """Tokens of the original prompt; what follows in `prompt` is output received before."""
    stop: tuple[int, ...]
    min_tokens: int
    prompt: list[int]
    output: list[int]
    """vLLM's own list, which grows."""

    @property
    def position(self) -> int:
        """Returns the output position of the next token."""
        return len(self.prompt) - self.num_prompt + len(self.output)

    @property
    def is_plain(self) -> bool:
        """Says whether vLLM's choice, the token with the largest logit, is the one wanted."""
        sampling = self.sampling
        return not (
            sampling.temperature
            or sampling.logit_bias
            or sampling.allowed_token_ids
            or sampling.bad_token_ids
            or sampling.num_logprobs is not None
            or self.further
            or sampling.has_penalties
            or (self.stop and self.position < self.min_tokens)
        )

    @property
    def beginning(self) -> list[SamplingParams]:
        """Returns the parameters of the further answers, which begin with this one's first token."""
        return [] if self.output else self.further

    def sample_row(self, sampling: SamplingParams) -> SampleRow:
        has_penalties = sampling.has_penalties
        prompt = tuple(self.prompt[: self.num_prompt]) if has_penalties else ()
        said = (*self.prompt[self.num_prompt :], *self.output) if has_penalties or sampling.bad_token_ids else ()
        masked = self.stop if self.position < self.min_tokens else ()
        return SampleRow(
            self.position, sampling, prompt, said if has_penalties else (), masked, sampling.barred_after(said)
        )


def params_of(fields: Mapping[str, Any]) -> SamplingParams:
    """Returns the parameters as the worker's message has them. JSON's keys are words, and it has no tuples."""
    biases = {int(token_id): bias for token_id, bias in fields["logit_bias"].items()}
    bad = tuple(map(tuple, fields["bad_token_ids"]))
    allowed = tuple(fields["allowed_token_ids"])
    return SamplingParams(**{**fields, "logit_bias": biases, "allowed_token_ids": allowed, "bad_token_ids": bad})


class BatonSampling(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}
        """By the place in vLLM's batch."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._rows.pop(place, None)
        for place, params, prompt, output in batch_update.added:
            self._rows.pop(place, None)
            if (spec := (params.extra_args or {}).get("baton")) is not None:
                self._rows[place] = _Row(
                    spec["id"],
                    params_of(spec["params"]),
                    [params_of(each) for each in spec["further"]],
                    spec["num_prompt"],
                    tuple(spec["stop"]),
                    spec["min_tokens"],
                    prompt,
                    output,
                )
        for source, target, way in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if way is MoveDirectionality.SWAP and replaced is not None:
                self._rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        places = sorted(place for place, row in self._rows.items() if not row.is_plain)
        if not places:
            return logits
        rows = [self._rows[place] for place in places]
        index = torch.tensor(places, device=logits.device)
        wanted = [(at, sampling) for at, row in enumerate(rows) for sampling in (row.sampling, *row.beginning)]
        sources = torch.tensor([places[at] for at, _ in wanted], device=logits.device)
        found = iter(sample(logits[sources], [rows[at].sample_row(sampling) for at, sampling in wanted]))
        chosen = []
        for row in rows:
            token, further = next(found), [next(found) for _ in row.beginning]
            chosen.append(token.token_id)
            if further or row.sampling.num_logprobs is not None:
                self._tell(row, token, further)
        logits[index] = -torch.inf
        logits[index, torch.tensor(chosen, device=logits.device)] = 0.0
        return logits

    def _tell(self, row: _Row, token: SampledToken, further: list[SampledToken]) -> None:
        """Tells the worker what vLLM has no word for: log-probabilities, and the first tokens of further answers."""
        if (link := connector.first_rank_link()) is not None:
            told = [[each.token_id, each.logprob, each.top] for each in (token, *further)]
            link.send(messages.SAMPLED, id=row.seq_id, position=row.position, tokens=told)
