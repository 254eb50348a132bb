"""Tests the short form of `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import soak

pytestmark = [pytest.mark.clock, pytest.mark.long]


async def test_soak(tmp_path: Path) -> None:
    tally, reference = await soak(tmp_path, 0.0, seed=1, round_s=12.0)
    print(tally.table(reference))
    assert tally.wrong == []
    assert tally.leaked == []
    assert tally.grown() == []
    assert tally.outcomes["requests finished"] > 5
    assert tally.faults
