"""Tests that the router knows what stands in its workers' prefix caches, and sends prompts where they begin."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from pathlib import Path

from services.core.hashing import ShortHash, short_hashes
from services.router.policy import KnownCache
from services.worker.host import WorkerHost
from tests.support.blocks import cached
from tests.support.cluster import Answer, Cluster, running_cluster
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.workers import DECODE, PREFILL, until

BLOCK_SIZE = 16
ROUTER = {"policy_weight": ("prefill.prefix_cached=8",)}


def tokens(seed: str, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def indexed(worker: WorkerHost) -> set[ShortHash]:
    """Returns the short hashes of all blocks in the worker's prefix index."""
    return set(short_hashes(cached(worker.engine)))


def told(cluster: Cluster, worker: WorkerHost) -> KnownCache:
    """Returns what the worker has told the router."""
    (coordinator,) = cluster.coordinators
    cache = coordinator.workers.get(worker.worker_id).cache
    assert cache is not None
    return cache


def has_told(cluster: Cluster, worker: WorkerHost, hashes: Iterable[ShortHash]) -> bool:
    return all(hash in told(cluster, worker) for hash in hashes)


async def test_the_router_knows_every_workers_cache(tmp_path: Path) -> None:
    """Runs more prompts than the pools hold, so that blocks are evicted, and compares with the pools themselves."""
    roles = [PREFILL, PREFILL, DECODE]
    async with running_cluster(tiny_model("llama", tmp_path), roles, router=ROUTER, kv_blocks=24) as cluster:
        for turn in range(6):
            prompts = [tokens(f"{turn} {number}", 70) for number in range(4)]
            await asyncio.gather(*(cluster.greedy(prompt, 20) for prompt in prompts))
        for worker in cluster.workers:
            assert indexed(worker), "something is cached"
            await until(lambda worker=worker: has_told(cluster, worker, indexed(worker)), "all is told")
            await until(lambda worker=worker: len(told(cluster, worker)) == len(indexed(worker)), "and no more")
            assert worker.engine.stats().ledger.total == 24
        changes = [worker.engine.index_changes(None) for worker in cluster.workers]
        num_changes = sum(each.number for each in changes if each is not None)
        assert num_changes > 2 * 3 * 24, "the pools were filled several times"


async def test_prompts_go_where_they_begin(tmp_path: Path) -> None:
    """Proves that each of six conversations stays on the worker that has its beginning, also when all go on at once."""
    async with running_cluster(tiny_model("llama", tmp_path), [PREFILL, PREFILL, DECODE], router=ROUTER) as cluster:
        stems = [tokens(f"stem {number}", 8 * BLOCK_SIZE) for number in range(6)]
        homes = [
            prefill_worker(answer) for answer in await asyncio.gather(*(cluster.greedy(stem, 2) for stem in stems))
        ]
        for turn in range(4):
            prompts = [[*stem, *tokens(f"end {number} {turn}", 5)] for number, stem in enumerate(stems)]
            answers = await asyncio.gather(*(cluster.greedy(prompt, 2) for prompt in prompts))
            assert [prefill_worker(answer) for answer in answers] == homes
            assert [cached_tokens(answer) for answer in answers] == [8 * BLOCK_SIZE] * 6


def prefill_worker(answer: Answer) -> str:
    assert answer.completion is not None
    return answer.completion.workers.prefill


def cached_tokens(answer: Answer) -> int:
    assert answer.completion is not None
    return answer.completion.usage.cached_tokens
