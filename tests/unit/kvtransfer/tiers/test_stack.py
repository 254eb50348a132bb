"""Tests several tiers as one: who is asked, and who is left out."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from services.core.clock import ManualClock
from services.kvtransfer.tiers.host import HostTier
from services.kvtransfer.tiers.stack import SILENCE_S, Reading, TierStack
from tests.support.patience import HANG_S, Patience
from tests.support.tiers import BLOCK_BYTES, blocks_of, content, faulty_disk, hashes_of, memory_of


class Tiers:
    """Has a host tier of two blocks above a disk tier of eight."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.host = HostTier(BLOCK_BYTES, 2 * BLOCK_BYTES)
        self.disk, self.file = faulty_disk(folder / "a.kv", 8)
        self.disk.load()
        self.stack = TierStack([self.host, self.disk], self.clock)
        self.memory = memory_of(4)

    def write(self, *numbers: int) -> None:
        self.stack.write(hashes_of(numbers), blocks_of(numbers))

    def read(self, *numbers: int) -> int:
        num_read = self.stack.read(hashes_of(numbers), self.memory, range(len(numbers)))
        assert content(self.memory)[:num_read] == blocks_of(numbers[:num_read])
        return num_read

    def close(self) -> None:
        self.memory.close()
        self.stack.close()


@pytest.fixture
def tiers(tmp_path: Path):
    tiers = Tiers(tmp_path)
    yield tiers
    tiers.close()


def test_a_run_may_lie_in_several_tiers(tiers: Tiers) -> None:
    tiers.write(1, 2, 3, 4)
    assert set(tiers.host.held()) == set(hashes_of([3, 4]))
    tiers.host.write(hashes_of([2]), blocks_of([2]))
    assert tiers.stack.num_held(hashes_of([1, 2, 3, 4, 5])) == 4
    assert tiers.read(1, 2, 3, 4) == 4
    host, disk = tiers.stack.uses
    assert host.blocks_read > 0
    assert host.blocks_read + disk.blocks_read == 4


def test_what_is_corrupt_is_read_from_the_next_tier(tiers: Tiers) -> None:
    tiers.write(1, 2)
    slot = tiers.host._index.find(hashes_of([1])[0])
    assert slot is not None
    tiers.host._slot(slot)[5] ^= 1
    assert tiers.read(1, 2) == 2
    assert list(tiers.host.held()) == hashes_of([2])


def test_a_full_disk_is_left_out_of_writing(tiers: Tiers, caplog: pytest.LogCaptureFixture) -> None:
    tiers.write(1)
    tiers.file.write_errno = errno.ENOSPC
    for number in range(2, 6):
        tiers.write(number)
    assert sum("disk tier is left out" in record.message for record in caplog.records) == 1
    assert tiers.read(1) == 1
    assert tiers.stack.uses[1].blocks_refused == 4
    tiers.file.write_errno = 0
    tiers.clock.advance(5.0)
    caplog.set_level("INFO")
    tiers.write(7)
    assert "the disk tier takes blocks again" in caplog.messages
    assert tiers.disk.num_held(hashes_of([1, 7])) == 2


def test_a_disk_that_cannot_be_read_is_left_out(tiers: Tiers) -> None:
    tiers.write(1, 2, 3)
    tiers.file.read_errno = errno.EIO
    assert tiers.read(1, 2, 3) == 0
    tiers.file.read_errno = 0
    num_reads = tiers.file.num_reads
    assert tiers.read(1, 2, 3) == 0, "it is not asked during the pause"
    assert tiers.file.num_reads == num_reads
    assert tiers.read(2, 3) == 2, "the host tier is"
    tiers.clock.advance(5.0)
    assert tiers.read(1, 2, 3) == 3


def test_a_silent_disk_is_left_out(tiers: Tiers) -> None:
    tiers.write(1, 2, 3)
    tiers.file.answering.clear()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(tiers.read, 1)
        assert tiers.file.asked.wait(10)
        assert tiers.stack.num_held(hashes_of([1])) == 1, "it may only take a moment"
        tiers.clock.advance(SILENCE_S + 0.1)
        assert tiers.stack.num_held(hashes_of([1])) == 0
        tiers.file.answering.set()
        assert waiting.result() == 1
    assert tiers.stack.num_held(hashes_of([1])) == 0, "its pause goes on"
    tiers.clock.advance(5.0)
    assert tiers.stack.num_held(hashes_of([1])) == 1


@pytest.mark.parametrize("waited_s", [0.05, 0.3])
def test_a_tier_is_left_out_that_took_the_time_of_who_gave_up(tiers: Tiers, waited_s: float) -> None:
    """One gives up after half a second, in which something else was waited for first; another has much more time."""
    tiers.write(1, 2, 3)
    host, disk = tiers.stack.uses
    tiers.file.answering.clear()
    with ThreadPoolExecutor(2) as threads:
        patient, hasty = Reading(), Reading()
        first = threads.submit(tiers.stack.read_by_tier, hashes_of([1]), tiers.memory, [0], patient)
        assert tiers.file.asked.wait(10)
        tiers.clock.advance(waited_s)
        second = threads.submit(tiers.stack.read_by_tier, hashes_of([3, 1]), tiers.memory, [2, 1], hasty)
        patience = Patience(HANG_S)
        while len(disk.asked) < 2:
            assert not second.done()
            assert not patience.is_over()
        tiers.clock.advance(0.5 - waited_s)
        tiers.stack.too_slow(patient, 3.0)
        assert disk.reading.why is None
        tiers.stack.too_slow(hasty, 0.5)
        tiers.file.answering.set()
        assert second.result() == {"host": 1, "disk": 1}
        assert first.result() == {"disk": 1}
    assert host.reading.why is None
    assert disk.reading.why == ("it is slower than computing" if waited_s < 0.1 else None)
    assert tiers.read(1) == (waited_s > 0.1)


def test_the_time_of_several_questions_is_that_of_the_tier(tiers: Tiers) -> None:
    tiers.write(1, 2, 3)
    reading = Reading()
    for _ in range(3):
        tiers.file.asked.clear()
        tiers.file.answering.clear()
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(tiers.stack.read_by_tier, hashes_of([1]), tiers.memory, [0], reading)
            assert tiers.file.asked.wait(10)
            tiers.clock.advance(0.1)
            tiers.file.answering.set()
            assert asked.result() == {"disk": 1}
    tiers.stack.too_slow(reading, 0.4)
    assert tiers.stack.uses[1].reading.why is None
    tiers.stack.too_slow(reading, 0.3)
    assert tiers.stack.uses[1].reading.why == "it is slower than computing"


def test_takes_says_whether_a_block_is_worth_copying(tiers: Tiers) -> None:
    [first] = hashes_of([1])
    assert tiers.stack.takes(first)
    tiers.write(1)
    assert not tiers.stack.takes(first)
    tiers.write(2, 3)
    assert tiers.stack.takes(first), "the host tier has evicted it"


def test_a_tier_that_gives_block_after_block_is_not_silent(tiers: Tiers) -> None:
    """Heartbeats look at it meanwhile: what they tell routers must not say that it is gone."""
    tiers.write(1, 2, 3, 4, 5, 6)
    found = []

    class Slow:
        def write_blocks(self, block_ids: Sequence[int], data: Sequence[Any]) -> None:
            tiers.clock.advance(SILENCE_S / 2)
            found.append(tiers.stack.num_held(hashes_of([1])))

    assert tiers.stack.read(hashes_of(range(1, 5)), Slow(), range(4)) == 4
    assert found == [1] * 4
