"""Tests how much of a prefix is brought into a pool, by tables."""

from __future__ import annotations

from typing import Any

import pytest

from services.kv.handoff_admission import EngineRoom
from services.kv.prefix_admission import most_to_bring, why_not_brought

IDLE: dict[str, Any] = {
    "num_available": 100, "num_blocks": 100, "num_sequences": 0, "max_num_seqs": 8, "num_preempted": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("num_fresh", "room", "may"),
    [
        (25, {}, True),
        (25, {"num_available": 25}, True),
        (25, {"num_available": 24}, False),
        (25, {"num_available": 30, "num_sequences": 1}, True),
        (25, {"num_available": 29, "num_sequences": 1}, False),
        (25, {"num_available": 40, "num_sequences": 1, "num_wanted": 10}, True),
        (25, {"num_available": 39, "num_sequences": 1, "num_wanted": 10}, False),
        (1, {"num_sequences": 1, "num_preempted": 1}, False),
        (0, {"num_available": 0}, True),
    ],
)
def test_what_others_need_is_left_to_them(num_fresh: int, room: dict[str, Any], may: bool) -> None:
    assert (why_not_brought(num_fresh, EngineRoom(**{**IDLE, **room})) is None) == may


@pytest.mark.parametrize(("num_blocks", "num_bringing", "most"), [(100, 0, 25), (100, 20, 5), (100, 30, 0), (3, 0, 0)])
def test_all_that_is_brought_together_has_a_quarter_of_the_pool(num_blocks: int, num_bringing: int, most: int) -> None:
    assert most_to_bring(num_blocks, num_bringing) == most
