"""Tests that the sampler that runs in vLLM chooses the tokens that the torch engine chooses, for every parameter: after
the worker's message, which is JSON, after a replay, and wherever vLLM puts the rows of its batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.engine.sampling.sampler import sample
from services.engine.schedule.sequence import SamplingParams, Sequence, StoppingParams
from services.engine.schedule.step import next_part
from services.vllm import messages
from services.vllm.messages import JsonMessage
from tests.support.fake_vllm_package import MoveDirectionality, inside
from tests.support.told_vllm import BLOCK, ToldVllm

VOCAB = 60
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2
BEST, SECOND, THIRD = (int(each) for each in LOGITS.topk(3).indices)
PROMPT, RECEIVED, OUTPUT = [BEST, 7, 8], [SECOND, 9], [SECOND, 5]
"""The original prompt, what another worker has said, and what this one has."""
PARAMETERS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=1.7, seed=-(1 << 62)),
    "top_k": SamplingParams(temperature=1.7, top_k=5, seed=2),
    "top_p": SamplingParams(temperature=1.7, top_p=0.5, seed=3),
    "min_p": SamplingParams(temperature=1.7, min_p=0.3, seed=4),
    "repetition_penalty": SamplingParams(temperature=0.0, repetition_penalty=9.0),
    "presence_penalty": SamplingParams(temperature=0.0, presence_penalty=9.0),
    "frequency_penalty": SamplingParams(temperature=0.0, frequency_penalty=9.0),
    "logit_bias": SamplingParams(temperature=0.0, logit_bias={11: 30.0}),
    "allowed_token_ids": SamplingParams(temperature=0.0, allowed_token_ids=(12, 13, 14)),
    "a bad token": SamplingParams(temperature=0.0, bad_token_ids=((BEST,),)),
    "a bad word": SamplingParams(temperature=0.0, bad_token_ids=((OUTPUT[-1], BEST), (6, SECOND))),
    "a bad word over a replay": SamplingParams(temperature=0.0, bad_token_ids=((RECEIVED[-1], *OUTPUT, BEST),)),
    "all": SamplingParams(
        0.9, 0.9, 30, 0.01, 1.1, 0.3, 0.2, {11: 2.0}, 5, tuple(range(40)), ((OUTPUT[-1], BEST),), num_logprobs=2
    ),
}


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    with inside("sampling") as module:
        yield module


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[ToldVllm]:
    with ToldVllm(tmp_path) as vllm:
        yield vllm


def added(vllm: ToldVllm, sampling: SamplingParams, **fields: Any) -> tuple[Sequence, JsonMessage]:
    """Returns a sequence that goes on after a replay, and what vLLM is told of it."""
    tokens, stopping = [*PROMPT, *RECEIVED], StoppingParams(20, fields.pop("min_tokens", 0), frozenset({BEST}))
    sequence = Sequence(len(vllm.sent) + 1, tokens, len(tokens), sampling, stopping, 0.0, len(RECEIVED), **fields)
    vllm.engine.add(sequence)
    vllm.settle()
    message: JsonMessage = json.loads(json.dumps(vllm.sent[-1]))
    assert (message["kind"], message["id"]) == (messages.ADD, sequence.seq_id)
    return sequence, message


def of_torch(sequence: Sequence, output: list[int]) -> int:
    """Returns the token that the torch engine samples after the output."""
    token_ids = [*PROMPT, *RECEIVED, *output]
    there = Sequence(1, token_ids, 5, sequence.sampling, sequence.stopping, 0.0, len(RECEIVED))
    there.num_computed, there.block_ids = len(token_ids) - 1, [0]
    (token,) = sample(LOGITS.clone().unsqueeze(0), next_part(there, 1, BLOCK).rows)
    return token.token_id


def update(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"removed": [], "added": [], "moved": [], **fields})


def batch(module: Any, told: list[JsonMessage], output: list[int]) -> Any:
    """Returns the processor with a row for each message, in the order of the messages."""
    processor = module.BatonSampling(None, torch.device("cpu"), False)
    rows = [
        (place, SimpleNamespace(extra_args={"baton": each["sampling"]}), each["tokens"], output)
        for place, each in enumerate(told)
    ]
    processor.update_state(update(added=rows))
    return processor


def chosen(processor: Any, num_rows: int) -> list[int]:
    """Returns what vLLM takes with temperature 0."""
    found: list[int] = processor.apply(LOGITS.repeat(num_rows, 1)).argmax(-1).tolist()
    return found


@pytest.mark.parametrize("output", [[], OUTPUT], ids=["first", "later"])
def test_every_parameter_chooses_the_token_of_the_torch_engine(module: Any, vllm: ToldVllm, output: list[int]) -> None:
    for name, sampling in PARAMETERS.items():
        sequence, message = added(vllm, sampling)
        assert chosen(batch(module, [message], output), 1) == [of_torch(sequence, output)], name
        vllm.engine.abort(sequence.seq_id)
        vllm.tell(vllm.ranks[0], messages.GONE, ids=[sequence.seq_id])


def test_parameters_change_what_is_chosen(module: Any, vllm: ToldVllm) -> None:
    """Else the test above would show nothing."""
    for name in ("repetition_penalty", "presence_penalty", "logit_bias", "allowed_token_ids", "a bad token"):
        _, message = added(vllm, PARAMETERS[name])
        assert chosen(batch(module, [message], [BEST, *OUTPUT]), 1) != [BEST], name
    for name in ("a bad word", "a bad word over a replay"):
        sequence, message = added(vllm, PARAMETERS[name])
        assert chosen(batch(module, [message], OUTPUT), 1) == [SECOND], name
        assert chosen(batch(module, [message], []), 1) == [BEST], name
        vllm.engine.abort(sequence.seq_id)
        vllm.tell(vllm.ranks[0], messages.GONE, ids=[sequence.seq_id])


def test_a_stop_token_is_not_chosen_before_min_tokens_of_the_whole_output(module: Any, vllm: ToldVllm) -> None:
    _, message = added(vllm, PARAMETERS["greedy"], min_tokens=len(RECEIVED) + 1)
    assert chosen(batch(module, [message], []), 1) == [SECOND]
    assert chosen(batch(module, [message], [9]), 1) == [BEST]


def test_rows_keep_their_parameters_wherever_they_are_put(module: Any, vllm: ToldVllm) -> None:
    pairs = [added(vllm, SamplingParams(temperature=1.7, seed=seed)) for seed in range(6)]
    processor = batch(module, [message for _, message in pairs], OUTPUT)
    tokens = [of_torch(sequence, OUTPUT) for sequence, _ in pairs]
    assert len(set(tokens)) > 1
    assert chosen(processor, 6) == tokens
    moved = [(5, 1, MoveDirectionality.UNIDIRECTIONAL), (0, 2, MoveDirectionality.SWAP)]
    processor.update_state(update(removed=[1], moved=moved))
    assert chosen(processor, 5) == [tokens[at] for at in (2, 5, 0, 3, 4)]
    processor.update_state(None)
    assert chosen(processor, 5) == [tokens[at] for at in (2, 5, 0, 3, 4)]


def test_further_answers_and_log_probabilities_are_told_by_the_first_rank(
    module: Any, vllm: ToldVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[JsonMessage] = []
    link = SimpleNamespace(send=lambda kind, **fields: told.append({"kind": kind, **fields}))
    further = [Sequence(50, [], 0, SamplingParams(temperature=1.7, seed=8), StoppingParams(9), 0.0)]
    first, message = added(vllm, SamplingParams(temperature=1.7, seed=7, num_logprobs=2), further=further)
    processor = batch(module, [message], [])
    monkeypatch.setattr(module.connector, "first_rank_link", lambda: None)
    assert chosen(processor, 1) == [of_torch(first, [])]
    assert not told, "another rank says nothing"
    monkeypatch.setattr(module.connector, "first_rank_link", lambda: link)
    chosen(processor, 1)
    (sampled,) = told
    assert (sampled["kind"], sampled["id"], sampled["position"]) == (messages.SAMPLED, first.seq_id, len(RECEIVED))
    assert [token_id for token_id, _, _ in sampled["tokens"]] == [of_torch(first, []), of_torch(further[0], [])]
    assert [len(top) for _, _, top in sampled["tokens"]] == [2, 0]
