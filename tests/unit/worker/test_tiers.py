"""Tests what a worker's tiers do around the pool: copies ahead of eviction, reading back, and what is told of both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.kv.pool import Holder
from services.kv.tier_standing import TierStanding
from services.kvtransfer.tiers.disk import DiskTier
from services.kvtransfer.tiers.stack import SILENCE_S
from tests.support.tier_pool import NUM_BLOCKS, Pool, any_room
from tests.support.tiers import BLOCK_BYTES, blocks_of, content, hashes_of, memory_of
from tests.support.workers import until


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    pool = Pool(tmp_path)
    await until(lambda: not pool.disk._loading, "the file has been read")
    yield pool
    pool.memory.may_copy.set()
    pool.file.answering.set()
    await pool.tiers.close()
    pool.engine.check_idle()
    pool.engine.close()
    assert not pool.defects


async def test_what_is_evicted_was_copied_before(pool: Pool) -> None:
    pool.cache(*range(NUM_BLOCKS // 2))
    await pool.demoted()
    assert not pool.in_tiers(), "half of the pool is free"
    for number in range(NUM_BLOCKS // 2, 3 * NUM_BLOCKS):
        pool.cache(number)
        await pool.demoted()
    assert pool.in_tiers() == set(hashes_of(range(3 * NUM_BLOCKS)))
    pool.tiers.index_changes(None)
    assert pool.tiers.num_lost == 0
    memory = memory_of(1)
    for number in range(3 * NUM_BLOCKS):
        assert sum((await pool.tiers.read(hashes_of([number]), memory, [0])).values()) == 1
        assert content(memory) == blocks_of([number])
    memory.close()


async def test_blocks_wait_until_the_disks_file_was_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load, load = threading.Event(), DiskTier.load

    def slow(disk: DiskTier) -> None:
        assert may_load.wait(20)
        load(disk)

    monkeypatch.setattr(DiskTier, "load", slow)
    pool = Pool(tmp_path)
    pool.cache(*range(NUM_BLOCKS))
    pool.tiers.demoter.stepped()
    await asyncio.sleep(0.1)
    may_load.set()
    await pool.demoted()
    assert pool.disk.num_held(hashes_of(range(NUM_BLOCKS))) == NUM_BLOCKS
    assert pool.in_tiers() == set(hashes_of(range(NUM_BLOCKS)))
    await pool.tiers.close()
    pool.engine.close()


async def test_blocks_wait_for_a_tier_that_pauses(pool: Pool) -> None:
    for use in pool.tiers.stack.uses:
        use.writing.failed("no", pool.tiers.stack._clock.now())
    pool.cache(*range(NUM_BLOCKS))
    await pool.demoted()
    assert not pool.in_tiers()
    for use in pool.tiers.stack.uses:
        use.writing = TierStanding()
    await pool.demoted()
    assert pool.in_tiers() == set(hashes_of(range(NUM_BLOCKS)))


async def test_what_is_evicted_before_is_counted(pool: Pool) -> None:
    pool.cache(*range(NUM_BLOCKS))
    pool.tiers.index_changes(None)
    pool.cache(*range(NUM_BLOCKS, NUM_BLOCKS + 5))
    pool.tiers.index_changes(None)
    assert pool.tiers.num_lost == 5


async def test_a_block_that_is_reused_while_it_is_copied_is_not_kept(pool: Pool) -> None:
    pool.cache(*range(NUM_BLOCKS))
    pool.memory.may_copy.clear()
    pool.tiers.demoter.stepped()
    await asyncio.to_thread(pool.memory.copying.wait, 20)
    pool.cache(100)  # in the place of 0
    pool.memory.may_copy.set()
    await until(lambda: pool.tiers.demoter.idle, "the copies have ended")
    assert pool.tiers.demoter.num_overtaken == 1
    assert pool.in_tiers() == set(hashes_of([*range(1, NUM_BLOCKS), 100]))
    assert pool.engine.num_cached(hashes_of([100])) == 1


async def test_a_block_that_is_back_under_its_hash_is_not_kept_either(pool: Pool) -> None:
    pool.cache(*range(NUM_BLOCKS))
    pool.memory.may_copy.clear()
    pool.tiers.demoter.stepped()
    await asyncio.to_thread(pool.memory.copying.wait, 20)
    pool.cache(100)
    [block] = pool.engine.set_aside(1, any_room)  # the place of 1, while another writes
    pool.engine.release([block], Holder.IMPORT)
    pool.cache(1)
    pool.memory.may_copy.set()
    await until(lambda: pool.tiers.demoter.idle, "the copies have ended")
    assert pool.tiers.demoter.num_overtaken == 2
    memory = memory_of(1)
    for number in (100, *range(1, NUM_BLOCKS)):
        assert await pool.tiers.read(hashes_of([number]), memory, [0])
        assert content(memory) == blocks_of([number])
    memory.close()


async def test_copies_hold_no_block(pool: Pool) -> None:
    pool.cache(*range(NUM_BLOCKS))
    pool.memory.may_copy.clear()
    pool.tiers.demoter.stepped()
    await asyncio.to_thread(pool.memory.copying.wait, 20)
    assert pool.engine.stats().ledger.cached == NUM_BLOCKS
    pool.memory.may_copy.set()
    await until(lambda: pool.tiers.demoter.idle, "the copies have ended")


async def test_routers_hear_of_pool_and_tiers_together(pool: Pool) -> None:
    pool.cache(*range(NUM_BLOCKS))
    await pool.demoted()
    whole = pool.tiers.index_changes(None)
    assert whole is not None
    assert whole.whole
    assert set(whole.stored) == set(hashes_of(range(NUM_BLOCKS)))
    pool.cache(100, 101, 102)
    changes = pool.tiers.index_changes(whole.number)
    assert changes is not None
    assert set(changes.stored) == set(hashes_of([100, 101, 102]))
    assert not changes.removed, "the tiers have those that were evicted for them"


async def test_routers_hear_nothing_of_a_tier_that_is_left_out(pool: Pool) -> None:
    for number in range(3 * NUM_BLOCKS):
        pool.cache(number)
        await pool.demoted()
    everything = set(hashes_of(range(3 * NUM_BLOCKS)))
    whole = pool.tiers.index_changes(None)
    assert whole is not None
    assert set(whole.stored) == everything
    disk = pool.tiers.stack.uses[1]
    disk.reading.failed("no", pool.tiers.stack._clock.now())
    without = pool.tiers.index_changes(whole.number)
    assert without is not None
    assert without.whole
    assert set(without.stored) == {*hashes_of(range(2 * NUM_BLOCKS, 3 * NUM_BLOCKS)), *pool.host.held()}
    assert pool.tiers.index_changes(without.number) is None
    disk.reading = TierStanding()
    back = pool.tiers.index_changes(without.number)
    assert back is not None
    assert set(back.stored) == everything


async def test_a_silent_tier_is_found_out_when_routers_are_told(pool: Pool) -> None:
    pool.disk.write(hashes_of([100]), blocks_of([100]))
    pool.file.answering.clear()
    memory = memory_of(1)
    reading = asyncio.create_task(pool.tiers.read(hashes_of([100]), memory, [0]))
    await asyncio.to_thread(pool.file.asked.wait, 20)
    disk = pool.tiers.stack.uses[1]
    for question in disk.asked:
        disk.asked[question] -= 2 * SILENCE_S
    told = pool.tiers.index_changes(None)
    assert told is not None
    assert not told.stored
    pool.file.answering.set()
    await reading
    memory.close()


async def test_a_read_that_is_given_up_writes_nothing_more(pool: Pool) -> None:
    pool.disk.write(hashes_of([1]), blocks_of([1]))
    memory = memory_of(1)
    pool.file.answering.clear()
    reading = asyncio.create_task(pool.tiers.read(hashes_of([1]), memory, [0]))
    await asyncio.to_thread(pool.file.asked.wait, 20)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    pool.file.answering.set()
    await until(lambda: not pool.tiers.stack.uses[1].asked, "the read has ended")
    assert content(memory) == [bytes(BLOCK_BYTES)]
    memory.close()


async def test_a_disk_that_hangs_holds_up_nobody_else(pool: Pool) -> None:
    pool.disk.write(hashes_of([1]), blocks_of([1]))
    pool.host.write(hashes_of([2]), blocks_of([2]))
    memory = memory_of(1)
    pool.file.answering.clear()
    readings = [asyncio.create_task(pool.tiers.read(hashes_of([1]), memory, [0])) for _ in range(3)]
    await asyncio.to_thread(pool.file.asked.wait, 20)
    assert await pool.tiers.read(hashes_of([2]), memory, [0]) == {"host": 1}
    pool.file.answering.set()
    assert await asyncio.gather(*readings) == [{"disk": 1}] * 3
    memory.close()
