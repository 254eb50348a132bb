"""Tests prefill and decode on GPUs, over both transports: by shared memory through pinned staging, and by gRPC."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from baton.v1 import types_pb2
from services.engine.cpu import pinning
from services.engine.model.kv_cache import KVCache, KVShape
from services.kv.regions import Region, check_regions
from services.kvtransfer.transports.staging import StagingArea
from tests.support.cluster import running_cluster
from tests.support.equality import GreedyReference
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.workers import DECODE, MIXED, PREFILL

TRANSPORTS = {"shm": types_pb2.TRANSPORT_SHM, "grpc": types_pb2.TRANSPORT_GRPC}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_split_output_is_transformers_own(transport: str, tmp_path: Path) -> None:
    """The second worker has a GPU of its own where there is one."""
    directory = tiny_model("llama", tmp_path)
    reference = GreedyReference(directory)
    devices = [{"device": "cuda:0"}, {"device": f"cuda:{torch.cuda.device_count() - 1}"}]
    chance = random.Random(0)
    prompts = [chance.choices(range(3, VOCAB_SIZE), k=length) for length in (1, 16, 33, 100, 257, 600)]
    async with running_cluster(
        directory, [PREFILL, DECODE], each=devices, transport=transport, kv_blocks=300
    ) as cluster:
        answers = await asyncio.gather(*(cluster.greedy(prompt, 20) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            reference.check(prompt, answer.token_ids)
            assert answer.completion is not None
            assert answer.completion.timings.transport == TRANSPORTS[transport]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_split_equals_unsplit_on_one_gpu(transport: str, tmp_path: Path) -> None:
    directory = tiny_model("llama", tmp_path)
    chance = random.Random(3)
    prompts = [chance.choices(range(3, VOCAB_SIZE), k=length) for length in (1, 16, 33, 100, 257)]
    answers = []
    for roles in ([MIXED], [PREFILL, DECODE]):
        devices = [{"device": "cuda:0"}] * len(roles)
        async with running_cluster(directory, roles, each=devices, transport=transport, kv_blocks=300) as cluster:
            answers.append([(await cluster.greedy(prompt, 20)).token_ids for prompt in prompts])
    assert answers[0] == answers[1]


async def test_a_gpu_and_a_cpu_worker_meet(tmp_path: Path) -> None:
    directory = tiny_model("llama", tmp_path)
    reference = GreedyReference(directory)
    prompt = random.Random(1).choices(range(3, VOCAB_SIZE), k=200)
    devices = [{"device": "cuda:0"}, {"device": "cpu"}]
    async with running_cluster(directory, [PREFILL, MIXED], each=devices, transport="shm") as cluster:
        reference.check(prompt, (await cluster.greedy(prompt, 20)).token_ids)


def test_a_block_s_region_is_its_memory_on_the_device() -> None:
    shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype=torch.bfloat16)
    cache = KVCache(shape, 3, torch.device("cuda"))
    for block in range(3):
        assert cache.region(block) == Region(cache.keys(0)[block].data_ptr(), cache.block_bytes, "cuda:0")
    check_regions(cache, cache.block_bytes)
    cache.close()


def test_staging_is_page_locked() -> None:
    area = StagingArea(8, 1 << 20)
    unlock = pinning.pin(area.whole)
    slot = torch.frombuffer(area.slot(3), dtype=torch.uint8)
    assert slot.is_pinned()
    del slot
    unlock()
    area.close()
