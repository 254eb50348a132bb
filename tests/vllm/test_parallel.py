"""Tests that a model which vLLM has in several ranks is handed over whole, shard by shard.

On a CPU the ranks talk over gloo. Each stages its part of a block; the block is final when all have. Stages of a
pipeline are not tested: without compiled graphs, which take minutes, vLLM 0.32 makes no buffers between them on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.engine.schedule.sequence import SamplingParams
from tests.support.cluster import running_cluster
from tests.support.equality import GreedyReference
from tests.support.streams import Job
from tests.support.vllm_driver import BLOCK, VllmDriver, config_of, load, tiny_for_vllm
from tests.support.workers import DECODE, PREFILL

pytestmark = pytest.mark.timeout(600)

MAX_TOKENS = 24
LENGTHS = (1, BLOCK, BLOCK + 1, 333)
TWO_RANKS = {"tensor_parallel_size": "2"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_for_vllm(tmp_path_factory.mktemp("models"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def reference(model: Path) -> GreedyReference:
    return GreedyReference(model)


async def test_a_router_pairs_no_workers_of_other_shardings(model: Path, reference: GreedyReference) -> None:
    """The decode worker computes the prompts itself. It is the first test: `drivers` stay until the end."""
    shardings: Iterator[dict[str, str]] = iter([{}, TWO_RANKS])
    flags = {"block_size": BLOCK, "kv_blocks": 96, "max_num_batched_tokens": 128, "max_model_len": 2048}
    async with running_cluster(
        model, [PREFILL, DECODE], load=lambda config: load(config, **next(shardings)), **flags
    ) as cluster:
        num_steps = cluster.workers[0].engine.stats().num_steps
        for length in LENGTHS:
            job = Job(tuple((at * 37 + length) % 300 + 3 for at in range(length)), MAX_TOKENS)
            answer = await cluster.stream(job.request())
            job.check(reference, answer)
            assert answer.completion is not None
            assert answer.completion.workers.decode == "w1"
            assert answer.completion.timings.transfer_blocks == 0
        assert cluster.workers[0].engine.stats().num_steps == num_steps


@pytest.fixture(scope="module")
def drivers(model: Path) -> Iterator[tuple[VllmDriver, VllmDriver]]:
    """Returns two workers' engines, each with two ranks."""
    config = config_of(model, max_num_batched_tokens=128)
    with VllmDriver(load(config, **TWO_RANKS)) as prefill, VllmDriver(load(config, **TWO_RANKS)) as decode:
        yield prefill, decode
        prefill.idle()
        decode.idle()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("seed", [None, 9])
def test_a_split_answer_is_that_of_the_model(
    drivers: tuple[VllmDriver, VllmDriver], reference: GreedyReference, length: int, seed: int | None
) -> None:
    prefill, decode = drivers
    prompt = [(at * 37 + length) % 300 + 3 for at in range(length)]
    sampling = SamplingParams(temperature=0.0) if seed is None else SamplingParams(temperature=1.0, seed=seed)
    first, rest = prefill.split(prompt, MAX_TOKENS, sampling, into=decode)
    assert rest.error is None
    answer = first.token_ids + rest.token_ids
    assert len(answer) == MAX_TOKENS
    reference.check_at_once(prompt, answer, seed=seed)
    assert decode.whole(prompt, MAX_TOKENS, sampling, cache_salt="whole") == answer


def test_other_shardings_have_other_digests(drivers: tuple[VllmDriver, VllmDriver], model: Path) -> None:
    """They have workers refuse each other's KV."""
    prefill, decode = drivers
    assert prefill.vllm.info.config_digest == decode.vllm.info.config_digest
    engine = load(config_of(model))
    try:
        assert engine.info.config_digest != decode.vllm.info.config_digest
        assert engine.info.weights_digest == decode.vllm.info.weights_digest
    finally:
        engine.stop()
        engine.close()
