"""Tests what every local tier must do, of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.kvtransfer.tiers.disk import slot_bytes_for
from services.kvtransfer.tiers.host import HostTier
from services.kvtransfer.tiers.tier import LocalTier
from tests.support.tiers import BLOCK_BYTES, blocks_of, content, hashes_of, loaded_disk, memory_of

MakeTier = Callable[[int], LocalTier]


@pytest.fixture(params=["host", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeTier]:
    """Makes a tier of so many blocks."""
    tiers: list[LocalTier] = []

    def a_tier(num_slots: int) -> LocalTier:
        tiers.append(
            HostTier(BLOCK_BYTES, num_slots * BLOCK_BYTES)
            if request.param == "host"
            else loaded_disk(tmp_path / f"{len(tiers)}.kv", num_slots)
        )
        return tiers[-1]

    yield a_tier
    for tier in tiers:
        tier.close()


def test_what_was_written_is_read(make: MakeTier) -> None:
    tier, memory = make(8), memory_of(4)
    tier.write(hashes_of([1, 2, 3]), blocks_of([1, 2, 3]))
    assert tier.num_held(hashes_of([1, 2, 3, 4])) == 3
    assert tier.num_held(hashes_of([4, 1])) == 0, "a run from the first"
    assert tier.read(hashes_of([1, 2, 3, 4]), memory, [3, 0, 2, 1]) == 3
    assert content(memory) == [*blocks_of([2]), bytes(BLOCK_BYTES), *blocks_of([3, 1])]
    memory.close()


def test_blocks_are_written_once(make: MakeTier) -> None:
    tier = make(2)
    told: list[bytes] = []
    tier.follow(told.append, told.remove)
    for _ in range(3):
        tier.write(hashes_of([1, 1]), blocks_of([1, 1]))
    assert told == hashes_of([1])
    assert tier.num_bytes in (BLOCK_BYTES, slot_bytes_for(BLOCK_BYTES))


def test_what_was_not_used_makes_room(make: MakeTier) -> None:
    tier, memory = make(2), memory_of(1)
    tier.write(hashes_of([1, 2]), blocks_of([1, 2]))
    tier.read(hashes_of([1]), memory, [0])
    tier.write(hashes_of([3]), blocks_of([3]))
    assert set(tier.held()) == set(hashes_of([1, 3]))
    assert tier.read(hashes_of([2]), memory, [0]) == 0
    memory.close()


def test_whoever_follows_hears_of_all(make: MakeTier) -> None:
    tier = make(2)
    tier.write(hashes_of([1]), blocks_of([1]))
    told: list[bytes] = []
    tier.follow(told.append, told.remove)
    tier.write(hashes_of([2, 3]), blocks_of([2, 3]))
    assert set(told) == set(hashes_of([2, 3])) == set(tier.held())


def test_readers_and_a_writer_at_once(make: MakeTier) -> None:
    """Slots are given to others while they are read: what is read is right or is not said to be there."""
    tier = make(3)

    def read(first: int) -> int:
        memory, num_read = memory_of(2), 0
        for number in range(first, first + 150):
            numbers = [number % 7, (number + 1) % 7]
            found = tier.read(hashes_of(numbers), memory, [0, 1])
            assert content(memory)[:found] == blocks_of(numbers[:found])
            num_read += found
        memory.close()
        return num_read

    def write() -> None:
        for number in range(400):
            tier.write(hashes_of([number % 7]), blocks_of([number % 7]))

    with ThreadPoolExecutor(3) as threads:
        writing = threads.submit(write)
        reads = [threads.submit(read, first) for first in (0, 3)]
        writing.result()
        assert sum(each.result() for each in reads) > 0
