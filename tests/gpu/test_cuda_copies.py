"""Tests the copies between a pool on a GPU and host memory: what arrives, and in which order with steps."""

from __future__ import annotations

import os
import time

import pytest
import torch

from services.engine.model import device_copies
from services.engine.model.kv_cache import KVCache, KVShape
from services.kvtransfer.transports.staging import StagingArea
from services.worker.machine import Machine

CUDA = torch.device("cuda:0")
NUM_BLOCKS = 40
SHAPE = KVShape(num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
BUSY_CYCLES = 2_000_000_000
"""Cycles of the device that take about a second."""


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_copies, "_BATCH_BYTES", 3 * SHAPE.block_bytes)  # so that there are many batches
    cache = KVCache(SHAPE, NUM_BLOCKS, CUDA)
    yield cache
    cache.close()


def keep_busy() -> torch.cuda.Event:
    """Keeps the steps' stream busy; the event happens when it no longer is."""
    torch.cuda.synchronize()
    over = torch.cuda.Event()
    torch.cuda._sleep(BUSY_CYCLES)
    over.record()
    return over


@pytest.mark.parametrize("count", [1, 3, 4, 17, 40])
def test_blocks_cross_in_both_directions(cache: KVCache, count: int) -> None:
    block_ids = list(range(NUM_BLOCKS))[::-1][:count]
    data = [os.urandom(SHAPE.block_bytes) for _ in block_ids]
    cache.write_blocks(block_ids, data)
    assert [bytes(block) for block in cache.read_blocks(block_ids)] == data
    others = [block for block in range(NUM_BLOCKS) if block not in block_ids]
    assert not any(any(block) for block in cache.read_blocks(others))


def test_blocks_are_copied_to_page_locked_slots(cache: KVCache) -> None:
    area: StagingArea = Machine("token").staging_area(8, SHAPE.block_bytes, str(CUDA))
    data = [os.urandom(SHAPE.block_bytes) for _ in range(5)]
    cache.write_blocks([1, 9, 4, 30, 2], data)
    slots = [area.slot(number) for number in (7, 0, 3, 1, 5)]
    cache.copy_blocks([1, 9, 4, 30, 2], slots)
    assert [bytes(slot) for slot in slots] == data
    for slot in slots:
        slot.release()
    area.close()


def test_copies_do_not_wait_for_a_step(cache: KVCache) -> None:
    data = [os.urandom(SHAPE.block_bytes) for _ in range(10)]
    cache.write_blocks(range(10), data)  # for the first time: what is slow then is not measured
    cache.read_blocks(range(10))
    over = keep_busy()
    cache.write_blocks(range(10, 20), data)
    assert [bytes(block) for block in cache.read_blocks(range(10, 20))] == data
    assert not over.query(), "the step is still running"
    torch.cuda.synchronize()


def test_a_step_does_not_wait_for_copies(cache: KVCache) -> None:
    copies = cache._copies
    assert copies is not None
    torch.cuda.synchronize()
    with copies._inward.queueing():
        torch.cuda._sleep(BUSY_CYCLES)
    under_way = torch.cuda.Event()
    with copies._inward.queueing():
        under_way.record()
    torch.ones(8, device=CUDA).sum()
    torch.accelerator.current_stream(CUDA).synchronize()  # as `DeviceRunner` waits for a step
    assert not under_way.query()
    torch.cuda.synchronize()


def test_a_write_returns_when_its_blocks_are_there(cache: KVCache) -> None:
    """The acknowledgement follows, and a step may read them at once."""
    copies = cache._copies
    assert copies is not None
    data = [os.urandom(SHAPE.block_bytes) for _ in range(7)]
    started = time.perf_counter()
    with copies._inward.queueing():
        torch.cuda._sleep(BUSY_CYCLES // 4)
    cache.write_blocks(range(7), data)
    assert time.perf_counter() - started > 0.02, "it waited for what was before it"
    found = cache._bytes[:7].cpu()
    assert [bytes(block.numpy()) for block in found] == data
