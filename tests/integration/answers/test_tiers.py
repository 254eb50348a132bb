"""Tests conversations whose KV has left the pool: they go on as they would have, and their KV is read, not computed."""

from __future__ import annotations

import errno
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.kvtransfer.tiers.disk import DiskTier
from services.worker.host import WorkerHost
from services.worker.tiers import WorkerTiers
from tests.integration.answers.test_followed_caches import cached_tokens, has_told
from tests.support.cluster import Answer, Cluster, running_cluster
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.tiers import FaultyFile
from tests.support.workers import DECODE, MIXED, PREFILL, Roles, pools_that_cannot_be_mapped, until

PROMPT_TOKENS = 100
NUM_BLOCKS = 24
ROUTER = {"policy_weight": ("prefill.prefix_cached=8",)}
"""The term has routers follow caches."""


def tokens(seed: object, length: int = PROMPT_TOKENS) -> list[int]:
    return random.Random(f"{seed}").choices(range(3, VOCAB_SIZE), k=length)


def tiers_of_worker(host: WorkerHost) -> WorkerTiers:
    assert host.tiers is not None
    return host.tiers


async def demoted(host: WorkerHost) -> None:
    tiers = tiers_of_worker(host)
    await until(lambda: tiers.demoter.idle, "the copies have ended")


@asynccontextmanager
async def cluster_with(tmp_path: Path, roles: list[Roles], **config: Any) -> AsyncIterator[Cluster]:
    model = tiny_model("llama", tmp_path)
    async with running_cluster(model, roles, router=ROUTER, kv_blocks=NUM_BLOCKS, **config) as cluster:
        for worker in cluster.workers:
            for tier in tiers_of_worker(worker).stack.local:
                await until(lambda tier=tier: not getattr(tier, "_loading", False), "the file has been read")
        yield cluster


async def turns(cluster: Cluster, num_conversations: int = 6) -> list[Answer]:
    """Goes through conversations that have no place in the pool together, twice; the second time each goes on."""
    answers = []
    history = [tokens(number) for number in range(num_conversations)]
    for turn in range(2):
        for number, prompt in enumerate(history):
            answer = await cluster.greedy([*prompt, *tokens(f"{number} {turn}", 5)], 4)
            answers.append(answer)
            for worker in cluster.workers:
                await demoted(worker)
    return answers


@pytest.mark.parametrize("roles", [[MIXED], [PREFILL, DECODE]], ids=["mixed", "split"])
@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_what_left_the_pool_is_read(tmp_path: Path, tier: str, roles: list[Roles]) -> None:
    config = {"kv_host_bytes": "64MiB"} if tier == "host" else {"kv_disk": str(tmp_path / "kv")}
    model = tiny_model("llama", tmp_path)
    async with running_cluster(model, roles, kv_blocks=128) as cluster:
        expected = [answer.token_ids for answer in await turns_without_tiers(cluster)]
    async with cluster_with(tmp_path, roles, **config) as cluster:
        answers = await turns(cluster)
        assert [answer.token_ids for answer in answers] == expected
        cached = [cached_tokens(answer) for answer in answers]
        assert cached[:6] == [0] * 6
        assert min(cached[6:]) >= PROMPT_TOKENS // 16 * 16, cached
        worker = cluster.workers[0]
        assert worker.tally.prefix_tokens_brought[tier] >= 4 * 96
        assert not worker.tally.prefixes_failed
        await until(lambda: has_told(cluster, worker, told_of(worker)), "routers know what the tiers have")
        assert len(told_of(worker)) > NUM_BLOCKS
        assert tiers_of_worker(worker).num_lost == 0


def told_of(worker: WorkerHost) -> set[int]:
    from services.core.hashing import short_hashes

    return set(short_hashes(hash for tier in tiers_of_worker(worker).stack.local for hash in tier.held()))


async def turns_without_tiers(cluster: Cluster) -> list[Answer]:
    pairs = [(turn, number) for turn in range(2) for number in range(6)]
    return [await cluster.greedy([*tokens(number), *tokens(f"{number} {turn}", 5)], 4) for turn, number in pairs]


async def test_a_pool_that_cannot_be_mapped(tmp_path: Path) -> None:
    """The host tier is for pools on a GPU, whose blocks are copied off the device."""
    with pools_that_cannot_be_mapped():
        async with cluster_with(tmp_path, [PREFILL, DECODE], kv_host_bytes="64MiB") as cluster:
            answers = await turns(cluster)
            assert min(cached_tokens(answer) for answer in answers[6:]) >= 96


async def test_the_disk_outlives_the_worker(tmp_path: Path) -> None:
    config = {"kv_disk": str(tmp_path / "kv")}
    answers = []
    for _ in range(2):
        async with cluster_with(tmp_path, [MIXED], **config) as cluster:
            answers.append(await turns(cluster))
    first, second = answers
    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in second]
    assert cached_tokens(first[0]) == 0
    assert cached_tokens(second[0]) >= 96


async def test_a_model_with_other_weights_finds_nothing(tmp_path: Path) -> None:
    config = {"kv_disk": str(tmp_path / "kv")}
    async with cluster_with(tmp_path, [MIXED], **config) as cluster:
        await turns(cluster)
    other = tiny_model("qwen2", tmp_path / "other")
    async with running_cluster(other, [MIXED], kv_blocks=NUM_BLOCKS, **config) as cluster:
        assert cached_tokens(await cluster.greedy(tokens(0), 2)) == 0
        names = [path.name for path in (tmp_path / "kv").iterdir()]
        assert names == [f"w0-{cluster.workers[0].layout.fingerprint}.kv"]


@pytest.mark.parametrize("fault", ["full", "unreadable", "unwritable", "corrupt", "silent"])
async def test_no_request_fails_by_a_disk(tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", tmp_path)
    async with running_cluster(model, [MIXED], kv_blocks=128) as cluster:
        expected = [answer.token_ids for answer in await turns_without_tiers(cluster)]
    async with cluster_with(tmp_path, [MIXED], kv_disk=str(tmp_path / "kv")) as cluster:
        [worker] = cluster.workers
        [use] = tiers_of_worker(worker).stack.uses
        assert isinstance(use.tier, DiskTier)
        faulty = FaultyFile(use.tier._file)
        use.tier._file = faulty
        match fault:
            case "full":
                faulty.write_errno = errno.ENOSPC
            case "unwritable":
                faulty.write_errno = errno.EIO
            case "unreadable":
                faulty.read_errno = errno.EIO
            case "corrupt":
                faulty.flipped_at = 5000
            case "silent":
                faulty.answering.clear()
        answers = await turns(cluster)
        faulty.answering.set()
        assert [answer.token_ids for answer in answers] == expected
        if fault == "corrupt":
            assert use.tier.num_corrupt > 0
        else:
            assert sum("the disk tier is left out" in message for message in caplog.messages) == 1
            assert use.writing.num_failures > 0
        assert worker.tally.internal_errors == 0
