"""Tests that what vLLM samples has the distribution that its parameters say, computed in another way here.

vLLM's own Python runs the logits processor, as its model runner does, over fixed logits and thousands of seeds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.engine.sampling.sampler import sample
from services.engine.schedule.sequence import SampleRow, SamplingParams
from tests.support import ROOT
from tests.support.distribution import assert_distribution

pytestmark = pytest.mark.timeout(300)

VOCAB = 400
NUM_SEEDS = 4000
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
BEST = [int(each) for each in LOGITS.topk(6).indices]
PROMPT = [BEST[0], BEST[1], 7, 8]
RECEIVED = [BEST[2], BEST[3], BEST[2]]
PARAMETERS = {
    "temperature": SamplingParams(temperature=1.6),
    "low temperature": SamplingParams(temperature=0.4),
    "top_k": SamplingParams(top_k=9),
    "top_p": SamplingParams(top_p=0.7),
    "top_p among top_k": SamplingParams(top_k=20, top_p=0.6),
    "min_p": SamplingParams(min_p=0.1),
    "repetition_penalty": SamplingParams(repetition_penalty=1.5),
    "presence_penalty": SamplingParams(presence_penalty=1.2),
    "frequency_penalty": SamplingParams(frequency_penalty=0.9),
    "logit_bias": SamplingParams(logit_bias={5: 6.0, BEST[0]: -3.0}),
    "all": SamplingParams(0.8, 0.9, 60, 0.01, 1.2, 0.5, 0.3, logit_bias={5: 5.0}),
}
HOT, GREEDY = SamplingParams(temperature=1.5), SamplingParams(temperature=0.0)
MOVED = [[7, 2, "UNIDIRECTIONAL"], [6, 4, "UNIDIRECTIONAL"], [0, 3, "SWAP"]]
MIN_TOKENS = {"enough tokens": len(RECEIVED), "too few tokens": len(RECEIVED) + 1}


def probabilities(sampling: SamplingParams) -> Tensor:
    """Returns the exact probability of each token, from the definitions."""
    logits = LOGITS.double()
    for token_id, bias in sampling.logit_bias.items():
        logits[token_id] += bias
    for token_id in {*PROMPT, *RECEIVED}:
        value = logits[token_id]
        factor = sampling.repetition_penalty
        logits[token_id] = value / factor if value > 0 else value * factor
    for token_id, count in Counter(RECEIVED).items():
        logits[token_id] -= sampling.presence_penalty + count * sampling.frequency_penalty
    found = (logits / sampling.temperature).softmax(-1)
    kept = torch.ones(VOCAB, dtype=torch.bool)
    if sampling.top_k:
        kept &= found >= found.topk(sampling.top_k).values[-1]
    among = found * kept / (found * kept).sum()
    ordered = among.sort(descending=True)
    num_kept = int((ordered.values.cumsum(0) < sampling.top_p).sum()) + 1
    nucleus = torch.zeros(VOCAB, dtype=torch.bool)
    nucleus[ordered.indices[:num_kept]] = True
    kept &= nucleus | (sampling.top_p >= 1)
    kept &= found >= sampling.min_p * found.max()
    return found * kept / (found * kept).sum()


def case_of(sampling: SamplingParams, **fields: Any) -> dict[str, Any]:
    """Returns a request with half of its output received before it came to this vLLM, and half from it."""
    params = {**dataclasses.asdict(sampling), "logit_bias": {str(k): v for k, v in sampling.logit_bias.items()}}
    return {
        "params": params,
        "prompt": [*PROMPT, RECEIVED[0]],
        "num_prompt": len(PROMPT),
        "received": RECEIVED[1:],
        "seeds": [seed * 7919 - 3 for seed in range(NUM_SEEDS)],
        **fields,
    }


def in_vllm(python: Path, cases: list[dict[str, Any]]) -> list[list[int]]:
    """Returns the tokens that vLLM's Python samples in each case."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [python, "-m", "tests.support.vllm_sampling"],
        input=json.dumps({"logits": LOGITS.tolist(), "cases": cases}),
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def sampled(python: Path) -> dict[str, list[int]]:
    cases = {name: case_of(sampling) for name, sampling in PARAMETERS.items()}
    cases["moved"] = case_of(HOT, seeds=list(range(8)), removed=[2, 4], moved=MOVED)
    for name, min_tokens in MIN_TOKENS.items():
        cases[name] = case_of(GREEDY, seeds=[0], stop=[BEST[0]], min_tokens=min_tokens)
    return dict(zip(cases, in_vllm(python, list(cases.values())), strict=True))


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_gives_its_distribution(sampled: dict[str, list[int]], name: str) -> None:
    assert_distribution(Counter(sampled[name]), probabilities(PARAMETERS[name]))


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_seed_gives_the_token_of_the_torch_engine(sampled: dict[str, list[int]], name: str) -> None:
    seeds = case_of(PARAMETERS[name])["seeds"][:500]
    assert sampled[name][:500] == here(PARAMETERS[name], seeds)


def here(sampling: SamplingParams, seeds: list[int]) -> list[int]:
    rows = [
        SampleRow(len(RECEIVED), dataclasses.replace(sampling, seed=seed), tuple(PROMPT), tuple(RECEIVED))
        for seed in seeds
    ]
    return [token.token_id for token in sample(LOGITS.repeat(len(rows), 1), rows)]


def test_rows_that_vllm_moves_keep_their_parameters(sampled: dict[str, list[int]]) -> None:
    """VLLM fills the places of rows that have ended with those at the end, and swaps others."""
    assert sampled["moved"] == here(HOT, [3, 1, 7, 0, 6, 5])


def test_stop_tokens_are_not_sampled_before_min_tokens(sampled: dict[str, list[int]]) -> None:
    assert [sampled[name] for name in MIN_TOKENS] == [[BEST[0]], [BEST[1]]]
