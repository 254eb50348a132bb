"""Tests that what a worker brings stays within its bounds however its sources' answers are timed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, cast

from baton.v1 import types_pb2
from services.core.clock import AwakeClock, MonotonicClock
from services.core.hashing import BlockHash
from services.engine.config import EngineInfo
from services.kv.imports import ImportTable
from services.kv.layout import Layout
from services.kv.prefix_admission import MOST_BRINGS, most_to_bring
from services.kvtransfer.borrowing import Loan
from services.kvtransfer.transports.staging import StagingArea
from services.kvtransfer.wire import layout_to_proto
from services.store.engine import StoreEngine
from services.worker import prefixes
from services.worker.prefixes import PrefixHost, PrefixLoader
from services.worker.tally import Tally
from tests.support.tiers import BLOCK_BYTES, hashes_of

NUM_BLOCKS = 32
LAYOUT = Layout("m", "w", "c", "float32", 1, 1, 1, 16)


class SlowSource:
    """Is a `Borrower` whose source notes what it is asked for, and answers when it is told to that it has none."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.may_answer = asyncio.Event()

    async def borrow(self, source: types_pb2.KVSource, hashes: Sequence[BlockHash]) -> Loan | None:
        self.asked.append(len(hashes))
        await self.may_answer.wait()
        return None


class Bringer:
    """Is the host of a loader: a store's engine, and a source that is slow to answer."""

    def __init__(self) -> None:
        info = EngineInfo("m", "w", "c", "n", "float32", 1, 1, 1, 16, NUM_BLOCKS, 256, 10, (), "cpu")
        self.engine = StoreEngine(info, StagingArea(NUM_BLOCKS, BLOCK_BYTES))
        self.source = SlowSource()
        self.tasks: list[asyncio.Task[None]] = []
        self.host = SimpleNamespace(
            engine=self.engine,
            borrower=self.source,
            imports=ImportTable(on_freed=lambda _: None),
            tiers=None,
            layout=LAYOUT,
            tally=Tally(),
            incarnation=1,
            clock=MonotonicClock(),
            awake=AwakeClock(MonotonicClock()),
            spawn=self.spawn,
        )
        self.loader = PrefixLoader(cast(PrefixHost, self.host))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        self.tasks.append(task := asyncio.create_task(work, name=name))
        return task

    def keep(self, first: int, num_blocks: int) -> int:
        where = types_pb2.KVSource(address="127.0.0.1:1", incarnation=2, layout=layout_to_proto(LAYOUT))
        return self.loader.keep(where, hashes_of(range(first, first + num_blocks)))


async def test_what_sources_are_asked_for_at_once_stays_within_the_quarter() -> None:
    """It counts before the source has answered, so that the answers cannot exceed the quarter together."""
    bringer = Bringer()
    for number in range(MOST_BRINGS):
        assert bringer.keep(100 * number, 5) == 5
    for _ in range(100):  # turns of the loop: each task gets as far as it can while no source answers
        await asyncio.sleep(0)
    assert sum(bringer.source.asked) == most_to_bring(NUM_BLOCKS, 0)
    bringer.source.may_answer.set()
    await asyncio.gather(*bringer.tasks)
    bringer.keep(1000, NUM_BLOCKS)
    await asyncio.gather(*bringer.tasks)
    assert bringer.source.asked[-1] == most_to_bring(NUM_BLOCKS, 0), "what came to nothing counts no more"


async def test_a_borrower_does_not_wait_for_a_turn_of_its_lender() -> None:
    """Those turns may all be held by what waits for a turn of the borrower."""
    bringer = Bringer()
    for number in range(MOST_BRINGS):
        bringer.keep(100 * number, 1)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(bringer.source.asked) == MOST_BRINGS // 2, "half of the turns are for sequences of this worker"
    bringer.host.tiers = SimpleNamespace(has=lambda hash: True)
    async with asyncio.timeout(prefixes._MOST_S / 2):
        await bringer.loader.recall(hashes_of(range(5000, 5001)))
    bringer.host.tiers = None
    bringer.source.may_answer.set()
    await asyncio.gather(*bringer.tasks)


async def test_prefixes_to_keep_are_bounded_from_when_they_are_offered() -> None:
    bringer = Bringer()
    wanted = [bringer.keep(100 * number, 1) for number in range(3 * prefixes._MOST_KEEPING)]
    assert sum(wanted) == len(bringer.tasks) == prefixes._MOST_KEEPING
    bringer.source.may_answer.set()
    await asyncio.gather(*bringer.tasks)
    assert bringer.keep(0, 1) == 1
    await asyncio.gather(*bringer.tasks)
