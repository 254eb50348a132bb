"""Tests the end of a worker whose disk hangs: no wait is long, and no memory is taken from under a thread."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.worker import tiers as worker_tiers
from tests.support.tier_pool import NUM_BLOCKS, Pool
from tests.support.tiers import blocks_of, hashes_of
from tests.support.workers import until

pytestmark = pytest.mark.process

LONG_S = 20


@pytest.fixture
async def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    monkeypatch.setattr(worker_tiers, "_CLOSE_S", 0.1)
    pool = Pool(tmp_path)
    await until(lambda: not pool.disk._loading, "the file has been read")
    pool.disk.write(hashes_of([100]), blocks_of([100]))
    pool.file.told.clear()
    yield pool
    assert not pool.defects
    # What was left to the end of the process, which this is not.
    await until(lambda: not pool.tiers._underway, "the reads have ended")
    await until(lambda: all(each.done() for each in pool.tiers.demoter.underway), "the copies have ended")
    pool.tiers.stack.close()
    pool.tiers.demoter.area.close()


async def test_a_read_that_hangs(pool: Pool) -> None:
    pool.file.answering.clear()
    reading = asyncio.create_task(pool.tiers.read(hashes_of([100]), pool.memory, [0]))
    await asyncio.to_thread(pool.file.asked.wait, LONG_S)
    reading.cancel()
    async with asyncio.timeout(LONG_S):
        await pool.tiers.close()
    pool.engine.close()  # the read must not write to this any more
    pool.file.answering.set()


async def test_a_write_that_hangs(pool: Pool) -> None:
    pool.file.taking.clear()
    pool.cache(*range(NUM_BLOCKS))
    pool.tiers.demoter.stepped()
    await asyncio.to_thread(pool.file.told.wait, LONG_S)
    async with asyncio.timeout(LONG_S):
        await pool.tiers.close()
    pool.engine.close()
    pool.file.taking.set()
    await until(lambda: all(each.done() for each in pool.tiers.demoter.underway), "the copies have ended")
    assert pool.disk.num_held(hashes_of(range(NUM_BLOCKS))) == NUM_BLOCKS, "its memory was left to it"


async def test_a_file_that_is_still_being_looked_through(pool: Pool) -> None:
    pool.file.answering.clear()
    pool.disk._index.clear()
    pool.disk._loading = True
    pool.tiers._begin(pool.tiers.demoter.thread, pool.tiers._load, pool.disk)
    await asyncio.to_thread(pool.file.asked.wait, LONG_S)
    async with asyncio.timeout(LONG_S):
        await pool.tiers.close()
    pool.engine.close()
    pool.file.answering.set()


async def test_a_copy_is_awaited_and_none_begins_after_the_end(pool: Pool) -> None:
    pool.memory.may_copy.clear()
    pool.cache(*range(NUM_BLOCKS))
    pool.tiers.demoter.stepped()
    await asyncio.to_thread(pool.memory.copying.wait, LONG_S)
    closing = asyncio.create_task(pool.tiers.close())
    await asyncio.sleep(0.3)
    assert not closing.done(), "the pool is being read"
    pool.memory.may_copy.set()
    async with asyncio.timeout(LONG_S):
        await closing
    pool.engine.close()


def test_the_process_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.hanging_disk", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr.count("Traceback")) == (0, "closed\n", 0), ended.stderr
