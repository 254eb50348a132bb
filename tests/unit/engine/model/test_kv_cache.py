"""Tests the pool's memory: what is written where, and what a peer that maps the memfd sees."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from services.core import sealed_memory
from services.core.sealed_memory import SealedMemory
from services.engine.model.kv_cache import KVCache, KVShape
from services.engine.schedule.sequence import BlockCopy
from services.kv.layout import Layout
from services.kv.regions import check_regions

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype=torch.bfloat16)
NUM_BLOCKS = 5


@pytest.fixture
def cache() -> Iterator[KVCache]:
    cache = KVCache(SHAPE, NUM_BLOCKS, torch.device("cpu"))
    yield cache
    cache.close()


def test_layout_is_block_layer_kind_token_head(cache: KVCache) -> None:
    assert cache.block_bytes == 3 * 2 * 4 * 2 * 4 * 2
    key = torch.randn(2, 2, 4).bfloat16()
    value = torch.randn(2, 2, 4).bfloat16()
    rows = cache.rows(torch.tensor([4, 1]), torch.tensor([3, 0]))
    cache.write(rows[2], key, value)
    block = torch.frombuffer(bytearray(cache.read_blocks([4])[0]), dtype=torch.bfloat16).view(3, 2, 4, 2, 4)
    assert block[2, 0, 3].equal(key[0])
    assert block[2, 1, 3].equal(value[0])
    assert block.count_nonzero() == 16
    assert cache.keys(2)[1, 0].equal(key[1])
    assert cache.values(2)[1, 0].equal(value[1])
    assert cache.keys(1).count_nonzero() == 0


def test_a_peer_sees_the_same_bytes(cache: KVCache) -> None:
    assert cache.fd is not None
    cache.write_blocks([2], [bytes(range(192)) * 2])
    peer = os.open(f"/proc/self/fd/{cache.fd}", os.O_RDONLY)
    with mmap.mmap(peer, NUM_BLOCKS * cache.block_bytes, prot=mmap.PROT_READ) as mapped:
        assert mapped[2 * cache.block_bytes : 3 * cache.block_bytes] == bytes(cache.read_blocks([2])[0])
        assert not any(mapped[: 2 * cache.block_bytes])
    os.close(peer)


def test_blocks_travel_between_caches(cache: KVCache) -> None:
    other = KVCache(SHAPE, 1, torch.device("cpu"))
    cache.write_blocks([3], [os.urandom(cache.block_bytes)])
    other.write_blocks([0], cache.read_blocks([3]))
    assert bytes(other.read_blocks([0])[0]) == bytes(cache.read_blocks([3])[0])
    slots = bytearray(3 * cache.block_bytes)
    with memoryview(slots)[cache.block_bytes : 2 * cache.block_bytes] as slot:
        cache.copy_blocks([3], [slot])
    assert slots == bytes(cache.block_bytes) + cache.read_blocks([3])[0] + bytes(cache.block_bytes)
    other.close()


def test_a_block_s_region_is_its_memory(cache: KVCache) -> None:
    layout = Layout("m", "w", "c", "bfloat16", num_layers=3, num_kv_heads=2, head_dim=4, block_size=4)
    for block in range(NUM_BLOCKS):
        region = cache.region(block)
        assert region.address == cache.keys(0)[block].data_ptr()
        assert region.length == layout.block_bytes
        assert region.device == "cpu"
        cache.write_blocks([block], [os.urandom(cache.block_bytes)])
        assert ctypes.string_at(region.address, region.length) == bytes(cache.read_blocks([block])[0])
    check_regions(cache, layout.block_bytes)


def test_the_region_of_a_block_on_a_device_names_it() -> None:
    cache = KVCache(SHAPE, NUM_BLOCKS, torch.device("meta"))
    assert cache.region(1).device == "meta"
    assert cache.region(1).address - cache.region(0).address == cache.block_bytes
    assert cache.fd is None


def test_a_block_of_the_wrong_size_is_refused(cache: KVCache) -> None:
    with pytest.raises(ValueError, match="10 bytes"):
        cache.write_blocks([0], [bytes(10)])
    with pytest.raises(TypeError):
        cache.read_blocks([0])[0][0] = 1


def test_blocks_are_duplicated_whole(cache: KVCache) -> None:
    content = [bytes([number] * cache.block_bytes) for number in range(NUM_BLOCKS)]
    cache.write_blocks(range(NUM_BLOCKS), content)
    cache.duplicate([BlockCopy(1, 3), BlockCopy(1, 4)])
    assert [bytes(block) for block in cache.read_blocks(range(NUM_BLOCKS))] == [*content[:3], content[1], content[1]]


def test_clear_leaves_the_others(cache: KVCache) -> None:
    for block in range(NUM_BLOCKS):
        cache.write_blocks([block], [b"\xff" * cache.block_bytes])  # NaN everywhere
    cache.clear((1, 3))
    cache.clear(())
    assert [any(cache.read_blocks([block])[0]) for block in range(NUM_BLOCKS)] == [True, False, True, False, True]


def test_close_gives_the_descriptor_back() -> None:
    before = _num_memory_files()
    cache = KVCache(SHAPE, 1, torch.device("cpu"))
    assert _num_memory_files() == before + 1
    cache.close()
    cache.close()
    del cache
    assert _num_memory_files() == before


def _num_memory_files() -> int:
    """Returns how many descriptors are of files in memory: other threads of the process may open others meanwhile."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:")
    return count


def test_memory_of_the_next_blocks_is_allocated_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is allocated a little at a call, up to a bound beyond the blocks that are in use, and keeps its contents."""
    page = mmap.PAGESIZE
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=page // 32, block_size=8, dtype=torch.bfloat16)
    assert shape.block_bytes == page
    monkeypatch.setattr(sealed_memory, "_TOUCHED_AHEAD_BYTES", 8 * page)
    monkeypatch.setattr(sealed_memory, "_TOUCHED_AT_ONCE_BYTES", 4 * page)
    cache = KVCache(shape, 20, torch.device("cpu"))
    assert cache.fd is not None

    def num_allocated() -> int:
        assert cache.fd is not None
        return os.fstat(cache.fd).st_blocks * 512 // page

    cache.write_blocks([1], [b"7" * page])
    assert num_allocated() == 1
    assert cache.touch(0)
    assert num_allocated() == 4
    assert cache.touch(0)
    assert not cache.touch(0)
    assert num_allocated() == 8
    assert cache.touch(1), "a whole stretch for each, where the bound moves by less"
    assert not cache.touch(2)
    assert num_allocated() == 12
    assert bytes(cache.read_blocks([1])[0]) == b"7" * page
    while cache.touch(20):
        pass
    assert num_allocated() == 20, "and never more than there is"
    cache.close()
    assert not cache.touch(20)


def test_a_kernel_that_cannot_allocate_ahead_is_asked_once(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(self: SealedMemory, offset: int, num_bytes: int) -> bool:
        asked.append(offset)
        return False

    monkeypatch.setattr(SealedMemory, "populate", refuse)
    assert not cache.touch(0)
    assert not cache.touch(1)
    assert asked == [0]
