"""Tests that what was computed once is kept by a store, and comes back from there to workers that never computed it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import kvtransfer_pb2, kvtransfer_pb2_grpc
from services.router.policy import known_cache
from services.worker import prefixes
from tests.support.cluster import Cluster, running_cluster
from tests.support.equality import GreedyReference
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.patience import HANG_S
from tests.support.stores import running_store
from tests.support.trusted import dial
from tests.support.workers import DECODE, MIXED, PREFILL, Roles, running_worker, until, worker_config

MAX_TOKENS = 8
SHARED = random.Random(9).choices(range(3, VOCAB_SIZE), k=300)
CACHED = 288
ROUTER: dict[str, Any] = {"policy": ("round_robin",)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("kept"))


@pytest.fixture(autouse=True)
def always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every prefix brought: a tiny model computes it in no time."""
    monkeypatch.setattr(known_cache, "MARGIN", 0.0)
    monkeypatch.setattr(prefixes, "_LEAST_S", 10.0)
    monkeypatch.setattr(prefixes, "_MOST_S", 10.0)


async def told(cluster: Cluster, worker_id: str) -> None:
    """Waits until the worker has told the router that it has the shared prefix."""

    def num_blocks() -> int:
        coordinator = cluster.coordinators[0]
        return sum(len(each.cache or ()) for each in coordinator.workers.all() if each.info.worker_id == worker_id)

    await until(lambda: num_blocks() >= CACHED // 16, f"{worker_id} has told", HANG_S)


@pytest.mark.parametrize(
    ("roles", "transport"),
    [([MIXED], "shm"), ([PREFILL, DECODE], "shm"), ([PREFILL, DECODE], "tcp"), ([MIXED], "grpc")],
)
async def test_what_was_computed_outlives_those_who_computed_it(
    model: Path, roles: list[Roles], transport: str
) -> None:
    reference = GreedyReference(model)
    router = {**ROUTER, "split": "never" if len(roles) == 1 else "always"}
    async with running_cluster(model, roles, router=router, transport=transport) as cluster:
        config: dict[str, Any] = {
            "router": (cluster.router.control_address,),
            "silence_s": HANG_S,
            "transport": transport,
        }
        async with running_store(cluster.workers[0], 128, worker_id="s", **config) as store:
            await until(lambda: cluster.num_ready == len(roles) + 1, "the store is ready", HANG_S)
            answer = await cluster.greedy(SHARED, MAX_TOKENS)
            await told(cluster, "s")
            assert store.tally.prefix_tokens_brought["peer"] >= CACHED
            for worker in cluster.workers:
                worker.leave(60.0, "its successor comes")
            async with running_worker(worker_config(model, worker_id="new", **config), MIXED) as successor:
                await until(lambda: cluster.num_ready == 2, "the successor is ready", HANG_S)
                again = await cluster.greedy(SHARED, MAX_TOKENS)
                assert successor.tally.prefix_tokens_brought["peer"] == CACHED
                assert store.transfer.lender.tokens_lent == CACHED
        expected = reference.generate(SHARED, MAX_TOKENS)
        for each in (answer, again):
            reference.check(SHARED, each.token_ids, expected)


async def test_only_a_store_keeps_for_others(model: Path) -> None:
    async with running_worker(worker_config(model), MIXED) as host, dial(host.address) as channel:
        stub: Any = kvtransfer_pb2_grpc.KVTransferServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Keep(kvtransfer_pb2.KeepRequest(source=host.source()))
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
