"""A folder to fetch into; and no task is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.workers import until


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    await until(lambda: not asyncio.all_tasks() - before - {asyncio.current_task()}, "every task is over")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fetched").mkdir()
    return tmp_path / "fetched"
