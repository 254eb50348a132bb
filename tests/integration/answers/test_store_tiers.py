"""Tests that blocks which left the memory of a store, or of a worker, are lent from the disk below it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.core.hashing import BlockHash
from services.router.policy import known_cache
from services.worker import prefixes
from services.worker.host import WorkerHost
from tests.integration.answers.test_followed_caches import told
from tests.support.blocks import cached
from tests.support.cluster import Cluster, running_cluster
from tests.support.equality import GreedyReference
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.patience import HANG_S
from tests.support.stores import running_store
from tests.support.workers import MIXED, running_worker, until, worker_config

MAX_TOKENS = 8
NUM_BLOCKS = 96
"""A quarter of them is brought, or lent, at once."""
SHARED = random.Random(9).choices(range(3, VOCAB_SIZE), k=300)
CACHED = 288
ROUTER: dict[str, Any] = {"policy": ("round_robin",), "split": "never"}


@pytest.fixture(autouse=True)
def always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every prefix brought: a tiny model computes it in no time."""
    monkeypatch.setattr(known_cache, "MARGIN", 0.0)
    monkeypatch.setattr(prefixes, "_LEAST_S", 10.0)
    monkeypatch.setattr(prefixes, "_MOST_S", 10.0)


async def fill_with_others(cluster: Cluster, host: WorkerHost, hashes: set[BlockHash]) -> None:
    """Has other prompts computed until none of the blocks is in the pool."""
    tiers = host.tiers
    assert tiers is not None
    [disk] = tiers.stack.local
    for number in range(40):
        if not hashes & cached(host.engine):
            return
        before = len(cached(host.engine) | set(disk.held()))
        await cluster.greedy(random.Random(f"other {number}").choices(range(3, VOCAB_SIZE), k=300), 2)
        await until(lambda before=before: len(cached(host.engine) | set(disk.held())) > before, "it has come", HANG_S)
        await until(lambda: tiers.demoter.idle, "the copies have ended", HANG_S)
    raise AssertionError("the blocks stay in the pool")


@asynccontextmanager
async def successor_of(cluster: Cluster, config: dict[str, Any], model: Path) -> AsyncIterator[WorkerHost]:
    for worker in cluster.workers:
        worker.leave(60.0, "its successor comes")
    async with running_worker(worker_config(model, worker_id="new", **config), MIXED) as successor:
        await until(lambda: cluster.num_ready == 2, "the successor is ready", HANG_S)
        yield successor


@pytest.mark.parametrize("restarts", [False, True])
async def test_what_left_a_stores_memory_is_lent_from_its_disk(tmp_path: Path, restarts: bool) -> None:
    model = tiny_model("llama", tmp_path)
    reference = GreedyReference(model)
    async with running_cluster(model, [MIXED], router=ROUTER) as cluster:
        config: dict[str, Any] = {"router": (cluster.router.control_address,), "silence_s": HANG_S}
        of_store = {"worker_id": "s", "kv_disk": str(tmp_path / "kv"), **config}

        async def ready(store: WorkerHost) -> None:
            assert store.tiers is not None
            await until(lambda: not store.tiers.stack.local[0]._loading, "the file has been read", HANG_S)
            await until(lambda: cluster.num_ready == 2, "the store is ready", HANG_S)

        async def ends_here(store: WorkerHost) -> None:
            await until(lambda: len(told(cluster, store)) >= CACHED // 16, "routers know what it has", HANG_S)
            async with successor_of(cluster, config, model) as successor:
                answer = await cluster.greedy(SHARED, MAX_TOKENS)
                reference.check(SHARED, answer.token_ids, reference.generate(SHARED, MAX_TOKENS))
                assert successor.tally.prefix_tokens_brought["peer"] == CACHED
                assert store.tally.prefix_tokens_brought["disk"] == CACHED
                assert not store.tally.prefixes_failed

        async with running_store(cluster.workers[0], NUM_BLOCKS, **of_store) as store:
            await ready(store)
            await cluster.greedy(SHARED, MAX_TOKENS)
            await until(lambda: len(cached(store.engine)) >= CACHED // 16, "the store has it", HANG_S)
            await fill_with_others(cluster, store, cached(store.engine))
            if not restarts:
                await ends_here(store)
                return
        async with running_store(cluster.workers[0], NUM_BLOCKS, **of_store) as store:
            await ready(store)
            await ends_here(store)


async def test_what_left_a_workers_pool_is_lent_from_its_disk(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path)
    disk = {"kv_disk": str(tmp_path / "kv"), "kv_blocks": NUM_BLOCKS}
    async with running_cluster(model, [MIXED], router=ROUTER, **disk) as cluster:
        [worker] = cluster.workers
        config: dict[str, Any] = {"router": (cluster.router.control_address,), "silence_s": HANG_S}
        expected = (await cluster.greedy(SHARED, MAX_TOKENS)).token_ids
        await fill_with_others(cluster, worker, cached(worker.engine))
        await until(lambda: len(told(cluster, worker)) > NUM_BLOCKS, "routers know what it has", HANG_S)
        async with running_worker(worker_config(model, worker_id="new", **config), MIXED) as other:
            await until(lambda: cluster.num_ready == 2, "the other is ready", HANG_S)
            for _ in range(2):  # one at each
                assert (await cluster.greedy(SHARED, MAX_TOKENS)).token_ids == expected
            assert worker.tally.prefix_tokens_brought["disk"] == CACHED
            assert other.tally.prefix_tokens_brought["peer"] == CACHED
