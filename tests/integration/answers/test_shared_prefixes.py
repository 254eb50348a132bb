"""Tests that greedy output is what it always is where prefixes come from other workers' pools."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import control_pb2
from services.router.policy import known_cache
from services.worker import prefixes
from services.worker.host import WorkerHost
from tests.support.cluster import Cluster, running_cluster
from tests.support.equality import GreedyReference
from tests.support.kv_harness import NIXL
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.workers import DECODE, MIXED, PREFILL, until

MAX_TOKENS = 8
SHARED = random.Random(7).choices(range(3, VOCAB_SIZE), k=300)
CACHED = 288
ROUTER: dict[str, Any] = {"policy": ("round_robin",)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def reference(model: Path) -> GreedyReference:
    return GreedyReference(model)


@pytest.fixture(autouse=True)
def always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every prefix brought: a tiny model computes it in no time."""
    monkeypatch.setattr(known_cache, "MARGIN", 0.0)
    monkeypatch.setattr(prefixes, "_LEAST_S", 10.0)
    monkeypatch.setattr(prefixes, "_MOST_S", 10.0)


def brought(workers: list[WorkerHost]) -> list[int]:
    return [worker.tally.prefix_tokens_brought["peer"] for worker in workers]


async def told(cluster: Cluster, num_workers: int) -> None:
    """Waits until so many workers have told the router that they have the shared prefix."""

    def number() -> int:
        (coordinator,) = cluster.coordinators
        return sum(
            worker.cache is not None and len(worker.cache) >= CACHED // 16 for worker in coordinator.workers.all()
        )

    await until(lambda: number() >= num_workers, f"{num_workers} workers have told")


def question(seed: int) -> list[int]:
    return SHARED + random.Random(seed).choices(range(3, VOCAB_SIZE), k=40)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc", NIXL])
async def test_split_with_a_prefix_from_another_prefill_worker(
    model: Path, reference: GreedyReference, transport: str
) -> None:
    async with running_cluster(model, [PREFILL, PREFILL, DECODE], router=ROUTER, transport=transport) as cluster:
        for seed in range(4):
            answer = await cluster.greedy(question(seed), MAX_TOKENS)
            reference.check(question(seed), answer.token_ids, reference.generate(question(seed), MAX_TOKENS))
            await told(cluster, min(2, seed + 1))
        assert sorted(brought(cluster.workers[:2])) == [0, CACHED], "it was computed once"
        assert answer.prompt_info is not None
        assert answer.prompt_info.cached_tokens >= CACHED


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_unsplit_with_a_prefix_from_another_worker(
    model: Path, reference: GreedyReference, transport: str
) -> None:
    router = {**ROUTER, "split": "never"}
    async with running_cluster(model, [MIXED, MIXED], router=router, transport=transport) as cluster:
        for seed in range(4):
            answer = await cluster.greedy(question(seed), MAX_TOKENS)
            reference.check(question(seed), answer.token_ids, reference.generate(question(seed), MAX_TOKENS))
            await told(cluster, min(2, seed + 1))
        assert sorted(brought(cluster.workers)) == [0, CACHED]


async def test_the_second_turn_brings_what_the_decode_worker_has(model: Path, reference: GreedyReference) -> None:
    """The answer to the first turn was computed on the decode worker, and is a part of the second's prompt."""
    async with running_cluster(model, [PREFILL, DECODE], router=ROUTER) as cluster:
        first = await cluster.greedy(SHARED, 64)
        await cluster.idle()
        second = SHARED + list(first.token_ids) + [5, 6, 7]
        workers = cluster.coordinators[0].workers
        await until(lambda: len(workers.all()[1].cache or ()) >= 22, "the decode worker has told")
        answer = await cluster.greedy(second, MAX_TOKENS)
        reference.check(second, answer.token_ids, reference.generate(second, MAX_TOKENS))
        assert brought(cluster.workers)[0] >= 48
        assert answer.prompt_info is not None
        assert answer.prompt_info.cached_tokens > 336


async def test_what_is_brought_is_explained_and_learnt(model: Path) -> None:
    async with running_cluster(model, [PREFILL, PREFILL, DECODE], router=ROUTER) as cluster:
        for seed in range(2):
            await cluster.greedy(question(seed), MAX_TOKENS, request_id=f"r{seed}")
            await told(cluster, 1)
        explained = await cluster.control.Explain(control_pb2.ExplainRequest(request_id="r1"))
        (choice,) = [choice for choice in explained.requests[0].choices if choice.HasField("prefix")]
        sources = {worker.worker_id for worker in cluster.workers} - {choice.candidates[0].worker_id}
        assert choice.prefix.source in sources
        assert choice.prefix.num_tokens == CACHED
        assert choice.prefix.compute_ms > 0
        assert not choice.prefix.HasField("why_computed")
        assert choice.prefix.brought_tokens == CACHED
        assert choice.prefix.brought_ms > 0
        (target,) = [each for each in cluster.coordinators[0].workers.all() if each.bring_times]
        assert target.info.worker_id == choice.candidates[0].worker_id
        assert target.bring_times[choice.prefix.source].num_seen == 1
        status = (await cluster.status()).models[0]
        assert status.prefix_break_even.token_ms >= 0


async def test_why_what_others_have_is_computed_is_explained(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_cache, "MARGIN", 1e9)
    async with running_cluster(model, [PREFILL, PREFILL, DECODE], router=ROUTER) as cluster:
        for seed in range(2):
            await cluster.greedy(question(seed), MAX_TOKENS, request_id=f"r{seed}")
            await told(cluster, 1)
        explained = await cluster.control.Explain(control_pb2.ExplainRequest(request_id="r1"))
        (choice,) = [choice for choice in explained.requests[0].choices if choice.HasField("prefix")]
        assert choice.prefix.why_computed == control_pb2.PREFIX_COMPUTED_REASON_COSTS_MORE
        assert choice.prefix.num_tokens == CACHED
        assert not choice.prefix.HasField("brought_tokens")
        assert brought(cluster.workers) == [0, 0, 0]


async def test_nothing_is_brought_where_it_is_not_wanted(model: Path) -> None:
    router = {"share_prefixes": "never", "policy": ("round_robin",), "policy_weight": ("prefill.prefix_cached=0.001",)}
    async with running_cluster(model, [PREFILL, PREFILL, DECODE], router=router) as cluster:
        for seed in range(2):
            await cluster.greedy(question(seed), MAX_TOKENS)
            await told(cluster, 1)
        assert brought(cluster.workers) == [0, 0, 0]
        assert not (await cluster.status()).models[0].HasField("prefix_break_even")


async def test_a_source_that_is_killed_meanwhile_costs_only_the_computing(
    model: Path, reference: GreedyReference
) -> None:
    """Nothing is handed over, which could not come from such a source either."""
    async with running_cluster(model, [MIXED, MIXED], router={**ROUTER, "split": "never"}) as cluster:
        await cluster.greedy(question(0), MAX_TOKENS)
        await told(cluster, 1)
        for worker in cluster.workers:
            worker.transfer._servicer._incarnation += 1  # as if both had just restarted
        answers = await asyncio.gather(*(cluster.greedy(SHARED, 1) for _ in range(2)))
        expected = reference.generate(SHARED, 1)
        for answer in answers:
            reference.check(SHARED, answer.token_ids, expected)
        assert brought(cluster.workers) == [0, 0]
        for worker in cluster.workers:
            worker.transfer._servicer._incarnation -= 1
