"""Tests the copies between a pool on a device and host memory, with a device that does its work as late as it may."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import pytest
import torch

from services.engine.model import device_copies
from services.engine.model.device_copies import DeviceCopies
from services.engine.model.kv_cache import KVCache, KVShape
from tests.support.late_stream import LateStream

NUM_BLOCKS = 12


def made(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch, blocks_at_once: int = 2
) -> tuple[DeviceCopies, torch.Tensor]:
    monkeypatch.setattr(device_copies, "_BATCH_BYTES", blocks_at_once * block_bytes)
    pool = torch.zeros(NUM_BLOCKS, block_bytes, dtype=torch.uint8)
    return DeviceCopies(pool, LateStream), pool


def streams(copies: DeviceCopies) -> tuple[LateStream, LateStream]:
    outward, inward = copies._outward, copies._inward
    assert isinstance(outward, LateStream)
    assert isinstance(inward, LateStream)
    return outward, inward


@pytest.mark.parametrize("block_bytes", [64, 12])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 10])
def test_written_blocks_are_in_the_pool_on_return(
    block_bytes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch's memory is not filled again before the batch has left it, and all batches are waited for."""
    copies, pool = made(block_bytes, monkeypatch)
    block_ids = [11, 3, 7, 0, 9, 5, 1, 8, 2, 6][:count]
    data = [os.urandom(block_bytes) for _ in block_ids]
    copies.write(block_ids, data)
    found = {block: bytes(pool[block].numpy()) for block in range(NUM_BLOCKS)}
    assert found == dict.fromkeys(range(NUM_BLOCKS), bytes(block_bytes)) | dict(zip(block_ids, data, strict=True))
    _, inward = streams(copies)
    assert inward.num_marks == -(-count // 2), "one event for each batch"
    assert not inward.queue


def test_read_blocks_are_there_on_return(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, pool = made(64, monkeypatch)
    pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8))
    assert [bytes(block) for block in copies.read([4, 1, 9])] == [bytes(pool[block].numpy()) for block in (4, 1, 9)]
    slots = bytearray(3 * 64)
    with memoryview(slots) as view:
        copies.copy([2, 8], [view[128:], view[:64]])
    assert slots == bytes(pool[8].numpy()) + bytes(64) + bytes(pool[2].numpy())
    outward, inward = streams(copies)
    assert outward.num_marks == 2, "one event for all blocks of a call"
    assert inward.num_marks == 0, "reads do not wait behind writes"


def test_nothing_writes_to_the_pool_after_a_write_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gives its blocks back then, and their next owner may write to them at once."""
    copies, pool = made(64, monkeypatch)
    _, inward = streams(copies)
    with pytest.raises(ValueError, match="broadcast"):
        copies.write(range(6), [b"x" * 64] * 5 + [b"short"])
    assert not inward.queue
    assert pool[:4].eq(ord("x")).all(), "the batches before it were complete"
    copies.write([7], [b"y" * 64])
    assert pool[7].eq(ord("y")).all()


def test_a_batch_that_cannot_be_sent_whole_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, _ = made(64, monkeypatch)
    _, inward = streams(copies)
    monkeypatch.setattr(copies, "_elements", None)  # the last of a batch's three copies fails
    with pytest.raises(AttributeError):
        copies.write([1, 2], [b"x" * 64] * 2)
    assert not inward.queue


def test_threads_that_write_together_do_not_mix_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, pool = made(64, monkeypatch)

    def write(block_ids: Sequence[int], byte: bytes) -> None:
        for _ in range(20):
            copies.write(block_ids, [byte * 64] * len(block_ids))

    threads = [threading.Thread(target=write, args=args) for args in (((0, 1, 2, 3, 4), b"a"), ((5, 6, 7, 8, 9), b"b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool[:5].eq(ord("a")).all()
    assert pool[5:10].eq(ord("b")).all()


def test_a_cache_on_a_device_copies_as_one_on_a_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype=torch.bfloat16)
    data = [os.urandom(shape.block_bytes) for _ in range(5)]
    found = []
    for on_device in (False, True):
        cache = KVCache(shape, NUM_BLOCKS, torch.device("cpu"))
        if on_device:
            cache._copies = DeviceCopies(cache._bytes, LateStream)
        cache.write_blocks((1, 8, 3, 4, 10), data)
        targets = [bytearray(shape.block_bytes) for _ in range(2)]
        cache.copy_blocks((8, 2), [memoryview(target) for target in targets])
        found.append(([bytes(block) for block in cache.read_blocks(range(NUM_BLOCKS))], targets))
        with pytest.raises(ValueError, match="7 bytes"):
            cache.write_blocks((5, 6), [data[0], bytes(7)])
        assert not any(cache.read_blocks([5])[0]), "sizes are looked at before anything is written"
        cache.close()
    assert found[0] == found[1]
    assert found[0][1] == [data[1], bytes(shape.block_bytes)]
