"""Tests the default model over gRPC through the split: for real text of 1 to 2000 tokens it equals transformers'
`generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.cli.model_names import resolve_model
from services.core.process_config import DEFAULT_MODEL
from tests.support import ROOT
from tests.support.cluster import running_cluster
from tests.support.equality import GreedyReference
from tests.support.workers import DECODE, MIXED, PREFILL

# A guard against a hang: what transformers computes for the first test alone takes ten minutes on a slow machine.
pytestmark = [pytest.mark.timeout(1500), pytest.mark.default_model]

LENGTHS = (1, 5, 16, 17, 64, 129, 255, 256, 513, 1000, 1600, 2000)
MAX_TOKENS = 8

# Everything runs in one process here: a long step of one part may silence the others.
PATIENT: dict[str, Any] = {"silence_s": 60.0, "router": {"silence_s": 60.0}}

# Pairwise over transport, chunk, room on the decode worker, one by one or together; every length in at least one.
CASES = [
    # transport, chunk, decode blocks, together, lengths
    ("shm", 512, 800, False, (1, 17, 256)),
    ("grpc", 64, 800, True, (5, 64, 255)),
    pytest.param("shm", 512, 800, False, (1000, 2000), marks=pytest.mark.long),
    # 1600 tokens are 100 blocks: the others wait their turn
    pytest.param("shm", 64, 110, True, (16, 513, 129, 1600), marks=pytest.mark.long),
    pytest.param("grpc", 512, 110, False, (1, 129, 513), marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model(DEFAULT_MODEL).path


@pytest.fixture(scope="module")
def prompts(model: Path) -> dict[int, list[int]]:
    """Starts at different places of a real text, so that only what a case repeats is shared."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    ids = ids * (-(-2 * max(LENGTHS) // len(ids)))
    return {length: ids[3 * number : 3 * number + length] for number, length in enumerate(LENGTHS)}


class Expected:
    """Keeps what transformers generates, each prompt once, and only those that a test asks for."""

    def __init__(self, model: Path, prompts: dict[int, list[int]]) -> None:
        self.reference = GreedyReference(model)
        self._prompts = prompts
        self._outputs: dict[int, list[int]] = {}

    def check(self, length: int, found: Sequence[int]) -> None:
        """Asserts that `found` is the right continuation of the prompt of so many tokens."""
        prompt = self._prompts[length]
        if length not in self._outputs:
            self._outputs[length] = self.reference.generate(prompt, MAX_TOKENS)
        self.reference.check(prompt, found, self._outputs[length])


@pytest.fixture(scope="module")
def expected(model: Path, prompts: dict[int, list[int]]) -> Iterator[Expected]:
    expected = Expected(model, prompts)
    yield expected
    reference = expected.reference
    print(f"equal tokens {reference.num_compared}, outputs that ended at a near-tie {reference.num_near_ties}")
    assert reference.num_near_ties <= len(CASES)


@pytest.mark.parametrize(("transport", "chunk", "decode_blocks", "together", "lengths"), CASES)
async def test_real_text(
    model: Path,
    prompts: dict[int, list[int]],
    expected: Expected,
    transport: str,
    chunk: int,
    decode_blocks: int,
    together: bool,
    lengths: tuple[int, ...],
) -> None:
    each: list[dict[str, Any]] = [{"kv_blocks": 400}, {"kv_blocks": decode_blocks}]
    async with running_cluster(
        model, [PREFILL, DECODE], each=each, transport=transport, max_num_batched_tokens=chunk, **PATIENT
    ) as cluster:
        if together:
            answers = await asyncio.gather(*(cluster.greedy(prompts[length], MAX_TOKENS) for length in lengths))
        else:
            answers = [await cluster.greedy(prompts[length], MAX_TOKENS) for length in lengths]
        for length, answer in zip(lengths, answers, strict=True):
            expected.check(length, answer.token_ids)
        longest = max(lengths)
        again = await cluster.greedy(prompts[longest], MAX_TOKENS)
        expected.check(longest, again.token_ids)
        assert again.prompt_info is not None
        assert again.prompt_info.cached_tokens == (longest - 1) // 16 * 16


@pytest.mark.long
async def test_a_mixed_worker(model: Path, prompts: dict[int, list[int]], expected: Expected) -> None:
    lengths = (1, 17, 129, 255)
    async with running_cluster(model, [MIXED], kv_blocks=400, **PATIENT) as cluster:
        answers = await asyncio.gather(*(cluster.greedy(prompts[length], MAX_TOKENS) for length in lengths))
        for length, answer in zip(lengths, answers, strict=True):
            expected.check(length, answer.token_ids)
