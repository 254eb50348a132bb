"""Tests that greedy output over gRPC, through split prefill and decode, equals transformers' `generate`, token for
token."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from baton.v1 import types_pb2
from services.router.coordinator.request import Phase
from tests.support.cluster import Answer, Cluster, running_cluster
from tests.support.equality import GreedyReference
from tests.support.examples import combinations
from tests.support.models import FAMILIES, VOCAB_SIZE, tiny_model
from tests.support.patience import HANG_S
from tests.support.workers import DECODE, MIXED, PREFILL, pools_that_cannot_be_mapped

# Around the edges of blocks (16) and of every chunk size.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 257, 511, 513, 600)
MAX_TOKENS = 12
BATCH = 16


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}-{seed}").choices(range(3, VOCAB_SIZE), k=length)


class Expected:
    """Keeps the reference's outputs, computed once for the whole module."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.reference = GreedyReference(model)
        self._outputs: dict[tuple[int, ...], list[int]] = {}

    def check(self, prompt: Sequence[int], answer: Answer, max_tokens: int = MAX_TOKENS) -> None:
        key = (max_tokens, *prompt)
        if key not in self._outputs:
            self._outputs[key] = self.reference.generate(prompt, max_tokens)
        assert len(answer.token_ids) == max_tokens
        self.reference.check(prompt, answer.token_ids, self._outputs[key])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return Expected(tiny_model("llama", tmp_path_factory.mktemp("split")))


@pytest.fixture(autouse=True)
def near_ties_are_rare(expected: Expected) -> object:
    """Rounding may decide now and then, not as a rule."""
    yield
    reference = expected.reference
    print(f"equal tokens {reference.num_compared}, outputs that ended at a near-tie {reference.num_near_ties}")
    assert reference.num_near_ties * 200 <= reference.num_compared


async def all_together(
    cluster: Cluster, prompts: Sequence[Sequence[int]], max_tokens: int = MAX_TOKENS
) -> list[Answer]:
    return await asyncio.gather(*(cluster.greedy(prompt, max_tokens) for prompt in prompts))


@pytest.mark.parametrize(("transport", "chunk"), combinations(["shm", "grpc"], [16, 64, 512]))
async def test_lengths_alone_batched_and_cached(expected: Expected, transport: str, chunk: int) -> None:
    async with running_cluster(
        expected.model, [PREFILL, DECODE], transport=transport, max_num_batched_tokens=chunk, kv_blocks=600
    ) as cluster:
        prompts = [prompt_of(length) for length in LENGTHS]
        for prompt in prompts:
            answer = await cluster.greedy(prompt, MAX_TOKENS)
            expected.check(prompt, answer)
            assert answer.completion is not None
            assert (answer.completion.workers.prefill, answer.completion.workers.decode) == ("w0", "w1")
            assert answer.completion.timings.transport == {"shm": 1, "grpc": 2}[transport]
        others = [prompt_of(length, seed=1) for length in LENGTHS[-BATCH:]]
        for prompt, answer in zip(others, await all_together(cluster, others), strict=True):
            expected.check(prompt, answer)
        for prompt, answer in zip(prompts, await all_together(cluster, prompts), strict=True):
            expected.check(prompt, answer)
            assert answer.prompt_info is not None
            assert answer.prompt_info.cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize("num_slots", [2, 4096])
async def test_staged(expected: Expected, num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools that nobody can map are handed over through slots that all can, as between GPUs of one host."""
    monkeypatch.setattr("services.worker.transfer.num_slots_for", lambda memory, _: min(num_slots, memory.num_blocks))
    with pools_that_cannot_be_mapped():
        async with running_cluster(
            expected.model, [PREFILL, DECODE, MIXED], transport="shm", max_num_batched_tokens=64, kv_blocks=600
        ) as cluster:
            assert all("staged" in worker.transfer.summary for worker in cluster.workers)
            prompts = [prompt_of(length, seed=6) for length in LENGTHS[-BATCH:]]
            answers = await all_together(cluster, prompts)
            answers += [await cluster.greedy(prompt, MAX_TOKENS) for prompt in prompts[::5]]
            for prompt, answer in zip(prompts + prompts[::5], answers, strict=True):
                expected.check(prompt, answer)
            handed_over = [
                answer.completion.timings.transport
                for answer in answers
                if answer.completion is not None
                and answer.completion.workers.prefill != answer.completion.workers.decode
            ]
            assert len(handed_over) > 3
            assert set(handed_over) == {types_pb2.TRANSPORT_SHM}


EVERY_WAY = combinations(["shm", "staged", "grpc"], [16, 64, 512])
"""Pools mapped as they are, pools whose blocks go through slots, and blocks in messages; each in every chunk size."""


@contextlib.asynccontextmanager
async def handing_over(model: Path, transport: str, chunk: int, decode_blocks: int) -> AsyncIterator[Cluster]:
    """Yields a cluster of a prefill worker with room, and a decode worker with little."""
    with pools_that_cannot_be_mapped() if transport == "staged" else contextlib.nullcontext():
        async with running_cluster(
            model,
            [PREFILL, DECODE],
            each=[{"kv_blocks": 200}, {"kv_blocks": decode_blocks}],
            transport="grpc" if transport == "grpc" else "shm",
            max_num_batched_tokens=chunk,
        ) as cluster:
            yield cluster


def check_transports(answers: Sequence[Answer], transport: str) -> None:
    """Asserts that all handoffs came the way that was asked for."""
    expected = types_pb2.TRANSPORT_GRPC if transport == "grpc" else types_pb2.TRANSPORT_SHM
    assert {answer.completion.timings.transport for answer in answers if answer.completion} == {expected}


@pytest.mark.parametrize(("transport", "chunk"), EVERY_WAY)
async def test_after_preemption(expected: Expected, transport: str, chunk: int) -> None:
    """Outputs grow until the decode pool cannot hold them all: victims recompute and go on."""
    async with handing_over(expected.model, transport, chunk, decode_blocks=30) as cluster:
        prompts = [prompt_of(20 + n, seed=2) for n in range(BATCH)]
        answers = await all_together(cluster, prompts, 150)
        for prompt, answer in zip(prompts, answers, strict=True):
            expected.check(prompt, answer, 150)
        assert cluster.workers[1].engine.stats().num_preemptions > 0
        check_transports(answers, transport)


@pytest.mark.parametrize(("transport", "chunk"), EVERY_WAY)
async def test_parked_handoffs(expected: Expected, transport: str, chunk: int) -> None:
    """The decode pool holds two prompts at a time; the others wait under their leases."""
    async with handing_over(expected.model, transport, chunk, decode_blocks=24) as cluster:
        prompts = [prompt_of(150 + n, seed=3) for n in range(6)]
        most_parked = 0
        together = asyncio.gather(*(cluster.greedy(prompt, 40) for prompt in prompts))
        async with asyncio.timeout(HANG_S):
            while not together.done():
                most_parked = max(most_parked, cluster.router.coordinator.phases()[Phase.PARKED])
                await asyncio.sleep(0)
        answers = await together
        for prompt, answer in zip(prompts, answers, strict=True):
            expected.check(prompt, answer, 40)
        assert most_parked > 0
        check_transports(answers, transport)


async def test_mixed_workers(expected: Expected) -> None:
    async with running_cluster(expected.model, [MIXED, MIXED]) as cluster:
        prompts = [prompt_of(length, seed=4) for length in LENGTHS[-8:]]
        for prompt, answer in zip(prompts, await all_together(cluster, prompts), strict=True):
            expected.check(prompt, answer)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
async def test_families(family: str, tmp_path: Path) -> None:
    other = Expected(tiny_model(family, tmp_path))
    async with running_cluster(other.model, [PREFILL, DECODE], max_num_batched_tokens=48) as cluster:
        prompts = [prompt_of(length, seed=5) for length in (3, 16, 40, 130)]
        for prompt, answer in zip(prompts, await all_together(cluster, prompts), strict=True):
            other.check(prompt, answer)
    assert other.reference.num_near_ties <= 1
