"""Tests the line before the tokenizer's threads: turns, bytes at once, and those who leave it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from services.router.text.tokeniser_line import SHORT_BYTES, TokeniserLine

LONG = SHORT_BYTES + 1


class Work:
    """Is a text that is being tokenised until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> int:
        self.begun.set()
        assert self.go.wait(20)
        return 7

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 20)


@pytest.fixture
async def line() -> AsyncIterator[TokeniserLine]:
    line = TokeniserLine(1, most_bytes=10 * LONG)
    yield line
    line.close()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_texts_have_their_turns_in_order(line: TokeniserLine) -> None:
    works = [Work() for _ in range(3)]
    tasks = [asyncio.create_task(line.run(LONG, work)) for work in works]
    for index, (work, task) in enumerate(zip(works, tasks, strict=True)):
        await work.has_begun()
        assert line.num_texts == 3 - index
        assert not any(other.begun.is_set() for other in works[index + 1 :])
        work.go.set()
        assert await task == 7
    await turns()
    assert line.num_texts == 0


async def test_a_short_text_waits_for_no_long_one(line: TokeniserLine) -> None:
    work = Work()
    long = asyncio.create_task(line.run(LONG, work))
    await work.has_begun()
    assert await line.run(SHORT_BYTES, lambda: 1) == 1
    work.go.set()
    await long


async def test_who_leaves_the_line_frees_a_place_at_once(line: TokeniserLine) -> None:
    first, never, last = Work(), Work(), Work()
    tasks = [asyncio.create_task(line.run(LONG, work)) for work in (first, never, last)]
    await first.has_begun()
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    assert line.num_texts == 2
    first.go.set()
    await last.has_begun()
    assert not never.begun.is_set()
    last.go.set()
    assert await tasks[2] == 7


async def test_what_is_being_tokenised_keeps_its_thread_until_it_ends(line: TokeniserLine) -> None:
    first, second = Work(), Work()
    gone = asyncio.create_task(line.run(LONG, first))
    await first.has_begun()
    gone.cancel()
    await asyncio.wait([gone])
    task = asyncio.create_task(line.run(LONG, second))
    await turns()
    assert line.num_texts == 2
    assert not second.begun.is_set()
    first.go.set()
    await second.has_begun()
    second.go.set()
    assert await task == 7


async def test_a_turn_that_comes_with_the_cancellation_is_passed_on(
    line: TokeniserLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [Work() for _ in range(3)]
    tasks = [asyncio.create_task(line.run(LONG, work)) for work in works]
    await works[0].has_begun()
    lane = line._long
    free = lane._free

    def freed_and_left(num_bytes: int) -> None:
        """The second has its turn, and is cancelled before it hears of it."""
        monkeypatch.setattr(lane, "_free", free)
        free(num_bytes)
        tasks[1].cancel()

    monkeypatch.setattr(lane, "_free", freed_and_left)
    works[0].go.set()
    await works[2].has_begun()
    assert not works[1].begun.is_set()
    works[2].go.set()
    assert await tasks[2] == 7
    await asyncio.wait(tasks)
    await turns()
    assert line.num_texts == 0


async def test_bytes_at_once_are_bounded_but_a_single_text_may_have_more() -> None:
    line = TokeniserLine(4, most_bytes=2 * LONG)
    works = [Work() for _ in range(3)]
    sizes = [LONG, LONG, LONG]
    tasks = [asyncio.create_task(line.run(size, work)) for size, work in zip(sizes, works, strict=True)]
    await works[0].has_begun()
    await works[1].has_begun()
    assert not works[2].begun.is_set()
    huge = Work()
    tasks.append(asyncio.create_task(line.run(5 * LONG, huge)))
    for work in works:
        work.go.set()
    await huge.has_begun()
    huge.go.set()
    await asyncio.gather(*tasks)
    line.close()


async def test_the_wait_is_told_by_what_was_measured(line: TokeniserLine) -> None:
    assert line.wait_s(LONG) == 0.0, "nothing is known yet"
    await line.run(LONG, sum, range(100_000))
    await turns()
    assert line.wait_s(LONG) == 0.0, "nothing waits"
    work = Work()
    task = asyncio.create_task(line.run(LONG, work))
    one_s = None
    await work.has_begun()
    one_s = line.wait_s(LONG)
    others = [asyncio.create_task(line.run(LONG, int)) for _ in range(9)]
    await turns()
    assert one_s > 0
    assert line.wait_s(LONG) == pytest.approx(10 * one_s)
    assert line.wait_s(1) == 0.0, "short ones have a thread of their own"
    work.go.set()
    await asyncio.gather(task, *others)


async def test_an_error_is_its_callers_and_frees_the_thread(line: TokeniserLine) -> None:
    with pytest.raises(ZeroDivisionError):
        await line.run(LONG, lambda: 1 // 0)
    assert await line.run(LONG, lambda: 1) == 1
