"""Tests what the regions of a pool's blocks must be like for peers to find the right bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from services.core.errors import LayoutMismatch
from services.kv.regions import Buffer, Region, check_regions

POOL = Region(4096, 256, "cuda:1")


class Blocks:
    """Is a `BlockMemory` that is asked for its regions only."""

    block_bytes = 64

    def __init__(self, regions: list[Region], *, mappable: bool) -> None:
        self.fd = 3 if mappable else None
        self.num_blocks = len(regions)
        self._regions = regions

    def region(self, block_id: int) -> Region:
        return self._regions[block_id]

    def read_blocks(self, block_ids: Sequence[int]) -> Sequence[Buffer]:
        raise NotImplementedError

    def copy_blocks(self, block_ids: Sequence[int], targets: Sequence[memoryview]) -> None:
        raise NotImplementedError

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        raise NotImplementedError

    def fill_blocks(self, block_ids: Sequence[int], fill: Callable[[Sequence[memoryview]], None]) -> None:
        raise NotImplementedError


def test_a_part_lies_within_its_region() -> None:
    assert POOL.part(64, 128) == Region(4160, 128, "cuda:1")
    assert POOL.part(256, 0).length == 0
    for offset, length in ((-1, 1), (0, 257), (256, 1), (200, -1)):
        with pytest.raises(AssertionError):
            POOL.part(offset, length)


@pytest.mark.parametrize("mappable", [True, False])
def test_blocks_one_after_the_other_are_right(mappable: bool) -> None:
    check_regions(Blocks([POOL.part(64 * at, 64) for at in range(4)], mappable=mappable), 64)


def test_blocks_of_another_size_than_the_layout_s_are_not() -> None:
    with pytest.raises(LayoutMismatch, match="block 0 has 64 bytes, and by the layout 128"):
        check_regions(Blocks([POOL.part(64 * at, 64) for at in range(4)], mappable=False), 128)


def test_only_memory_that_is_mapped_as_a_whole_must_have_its_blocks_in_order() -> None:
    scattered = [POOL.part(offset, 64) for offset in (0, 64, 192)]
    check_regions(Blocks(scattered, mappable=False), 64)
    with pytest.raises(LayoutMismatch, match="block 2 does not follow"):
        check_regions(Blocks(scattered, mappable=True), 64)
