"""Tests where blocks that are fetched are checked."""

from __future__ import annotations

from typing import Any, cast

import pytest

from services.kv.regions import Region
from services.worker.config import WorkerConfig
from services.worker.transfer import Site, checks_blocks


class Memory:
    def __init__(self, device: str) -> None:
        self._device = device

    def region(self, block_id: int) -> Region:
        return Region(0, 1, self._device)


@pytest.mark.parametrize(
    ("asked", "device", "checked"),
    [
        ("auto", "cpu", True),
        ("auto", "cuda:0", False),
        ("always", "cuda:0", True),
        ("never", "cpu", False),
    ],
)
def test_blocks_are_checked_where_that_costs_little(asked: str, device: str, checked: bool) -> None:
    """A block of a GPU's would have to be copied from there once more."""
    nothing: Any = None
    memory = cast(Any, Memory(device))
    site = Site(WorkerConfig(checksums=asked), memory, nothing, nothing, nothing, "w", 1)
    assert checks_blocks(site) is checked


def test_blocks_are_checked_unless_a_flag_says_otherwise() -> None:
    assert WorkerConfig().checksums == "auto"
