"""The default model over gRPC through the split: real text of 1 to 2000 tokens equals transformers' `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.cli.model_cache import DEFAULT_MODEL, resolve_model
from tests.cluster import running_cluster
from tests.equality import GreedyReference
from tests.workers import DECODE, MIXED, PREFILL

pytestmark = [pytest.mark.timeout(600), pytest.mark.default_model]

LENGTHS = (1, 5, 16, 17, 64, 129, 255, 256, 513, 1000, 1600, 2000)
MAX_TOKENS = 10

# Pairwise over transport, chunk, room on the decode worker, one by one or together, prefix cached or not.
CASES = [
    # transport, chunk, decode blocks, together, rounds
    ("shm", 512, 800, False, 2),
    ("grpc", 64, 800, True, 1),
    ("shm", 64, 150, True, 1),  # 2000 tokens are 126 blocks: handoffs wait their turn
    ("grpc", 512, 150, False, 1),
]


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model(DEFAULT_MODEL).path


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    """Starts at different places of a real text, so that only what a case repeats is shared."""
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    ids = ids * (-(-2 * max(LENGTHS) // len(ids)))
    return [ids[3 * number : 3 * number + length] for number, length in enumerate(LENGTHS)]


class Expected:
    def __init__(self, model: Path, prompts: list[list[int]]) -> None:
        self.reference = GreedyReference(model)
        self.outputs = [self.reference.generate(prompt, MAX_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> Iterator[Expected]:
    expected = Expected(model, prompts)
    yield expected
    reference = expected.reference
    print(f"equal tokens {reference.num_compared}, outputs that ended at a near-tie {reference.num_near_ties}")
    assert reference.num_near_ties <= len(CASES)


@pytest.mark.parametrize(("transport", "chunk", "decode_blocks", "together", "rounds"), CASES)
async def test_real_text(
    model: Path,
    prompts: list[list[int]],
    expected: Expected,
    transport: str,
    chunk: int,
    decode_blocks: int,
    together: bool,
    rounds: int,
) -> None:
    each: list[dict[str, Any]] = [{"kv_blocks": 800}, {"kv_blocks": decode_blocks}]
    async with running_cluster(
        model, [PREFILL, DECODE], each=each, transport=transport, max_num_batched_tokens=chunk, silence_s=30.0
    ) as cluster:
        for round_number in range(rounds):
            if together:
                answers = await asyncio.gather(*(cluster.greedy(prompt, MAX_TOKENS) for prompt in prompts))
            else:
                answers = [await cluster.greedy(prompt, MAX_TOKENS) for prompt in prompts]
            for prompt, answer, wanted in zip(prompts, answers, expected.outputs, strict=True):
                expected.reference.check(prompt, answer.token_ids, wanted)
                assert answer.prompt_info is not None
                if round_number:
                    assert answer.prompt_info.cached_tokens == (len(prompt) - 1) // 16 * 16


async def test_a_mixed_worker(model: Path, prompts: list[list[int]], expected: Expected) -> None:
    async with running_cluster(model, [MIXED], kv_blocks=800, silence_s=30.0) as cluster:
        chosen = [0, 3, 6, 9]
        answers = await asyncio.gather(*(cluster.greedy(prompts[n], MAX_TOKENS) for n in chosen))
        for n, answer in zip(chosen, answers, strict=True):
            expected.reference.check(prompts[n], answer.token_ids, expected.outputs[n])
