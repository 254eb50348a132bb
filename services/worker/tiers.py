"""Keeps blocks that leave the pool in tiers below it, and reads them back for who asks.

Owns: the threads on which tiers work, the copies out of the pool ahead of eviction, and what routers are told of pool
and tiers together. Never: what a tier does (`services.kvtransfer.tiers`), or when a prefix is read back
(`services.worker.prefixes`). Nothing waits for a tier that fails, and no step for any.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from functools import partial
from typing import Any, TypeVar

from services.core.hashing import BlockHash
from services.engine.worker_engine import WorkerEngine
from services.kv.index_log import IndexChanges
from services.kv.index_union import IndexUnion
from services.kv.pool import CachedBlock
from services.kv.regions import Buffer
from services.kvtransfer.tiers.disk import DiskTier
from services.kvtransfer.tiers.stack import Reading, TierStack
from services.kvtransfer.tiers.tier import BlockTarget, ReadAbandoned, Tier, TierFailed
from services.worker.machine import Machine

log = logging.getLogger(__name__)

T = TypeVar("T")
_NUM_READERS = 4
"""Prefixes that are read at once: each has a thread, so that a tier that hangs does not hold up the others."""
_BYTES_AT_ONCE, _MOST_AT_ONCE = 8 << 20, 64
"""Bytes and blocks that are copied, at most, before it is asked whether the blocks are still what they were."""
_PAUSE_S = 0.02
"""From one look at the pool to the next, since a step of a few milliseconds changes little."""
_CLOSE_S = 2.0
"""So long the end waits for tiers."""


class WorkerTiers:
    """Has a worker's tiers. Made, called and closed on the event loop."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        engine: WorkerEngine,
        machine: Machine,
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
        defect: Callable[[Exception], None],
    ) -> None:
        """`tiers` are closed with this. `call_later` and `defect` are the worker's."""
        self.stack = TierStack(tiers, machine.awake)
        self.demoter = Demoter(self.stack, engine, machine, call_later, defect, self._follow)
        self._defect = defect
        self._lock = threading.Lock()
        """Guards the union, of which tiers tell on their threads."""
        self._union = IndexUnion(engine.index_changes)
        self._readers = [machine.thread("kv-tier-read") for _ in range(_NUM_READERS)]
        self._idle = list(self._readers)
        self._underway: set[Future[Any]] = set()
        """What readers have begun, and files that are looked through or are to be."""
        self._num_remote = len(tiers) - len(self.stack.local)
        for number, local in enumerate(self.stack.local):
            local.follow(partial(self._stored, tier=number), partial(self._removed, tier=number))
        for tier in tiers:
            if isinstance(tier, DiskTier):
                # On the thread of the copies: a block is copied once, and until then the disk would not take it.
                self._begin(self.demoter.thread, self._load, tier)

    @property
    def num_slots(self) -> int:
        """Returns how many blocks the local tiers can hold."""
        return sum(tier.num_slots for tier in self.stack.local)

    @property
    def num_lost(self) -> int:
        """Returns how many blocks were evicted that no local tier had."""
        return self._union.num_lost

    def index_changes(self, after: int | None) -> IndexChanges | None:
        """Returns how what pool and local tiers have has changed, as `WorkerEngine.index_changes` does. A tier that is
        left out of reading has nothing."""
        readable = self.stack.readable_locals()
        with self._lock:
            self._union.count_tiers(readable)
            return self._union.since(after)

    def has(self, hash: BlockHash) -> bool:
        """Returns whether routers are told that the block is here."""
        with self._lock:
            return self._union.has(hash)

    async def num_held(self, hashes: Sequence[BlockHash], reading: Reading | None = None) -> int:
        """Returns how many of the blocks, from the first on, could be read."""
        if not self._num_remote:
            return self.stack.num_held(hashes, reading)
        return await self._on_reader(self.stack.num_held, hashes, reading) or 0

    async def read(
        self,
        hashes: Sequence[BlockHash],
        memory: BlockTarget,
        targets: Sequence[int],
        reading: Reading | None = None,
    ) -> dict[str, int]:
        """Reads as `Tier.read` does, and returns how many blocks came from which tier.

        Nothing is written to the memory after it has returned, also if it is cancelled.
        """
        guarded = _Guarded(memory)
        try:
            return await self._on_reader(self.stack.read_by_tier, hashes, guarded, targets, reading) or {}
        finally:
            guarded.abandon()

    async def close(self) -> None:
        """Closes the tiers when what is under way has ended, for which it waits a few seconds.

        Afterwards nothing uses the pool. Where a tier hangs, the tiers and the memory of the copies are left as they
        are until the process ends, which does not wait for them: a thread may be in the midst of either.
        """
        self.demoter.end()
        threads = [*self._readers, self.demoter.thread]
        for thread in threads:
            thread.shutdown(wait=False)
        await asyncio.to_thread(self._shut_down, threads, [*self._underway, *self.demoter.underway])

    def _shut_down(self, threads: Sequence[Executor], underway: Sequence[Future[Any]]) -> None:
        if wait(underway, _CLOSE_S).not_done:
            log.warning("a tier has not answered for %g s, and is left as it is", _CLOSE_S)
            self.demoter.leave_pool()
            return
        for thread in threads:
            thread.shutdown()
        self.stack.close()
        self.demoter.area.close()

    async def _on_reader(self, work: Callable[..., T], *arguments: Any) -> T | None:
        """Returns what the work returns on a thread of its own; None if each thread has something to do."""
        if not self._idle:
            return None
        reader = self._idle.pop()
        loop = asyncio.get_running_loop()
        reading = self._begin(reader, work, *arguments)
        # The thread has work until the work has ended, even if nobody waits for it any more.
        reading.add_done_callback(lambda _: _tell(loop, self._idle.append, reader))
        return await asyncio.wrap_future(reading)

    def _begin(self, thread: Executor, work: Callable[..., T], *arguments: Any) -> Future[T]:
        future = thread.submit(work, *arguments)
        self._underway.add(future)
        future.add_done_callback(self._underway.discard)
        return future

    def _load(self, tier: DiskTier) -> None:
        try:
            tier.load()
        except TierFailed as error:
            log.warning("the %s tier is not used: %s", tier.name, error)
        except Exception as error:
            self._defect(error)

    def _follow(self) -> None:
        with self._lock:
            self._union.follow()

    def _stored(self, hash: BlockHash, tier: int) -> None:
        with self._lock:
            self._union.store(hash, tier)

    def _removed(self, hash: BlockHash, tier: int) -> None:
        with self._lock:
            self._union.remove(hash, tier)


class Demoter:
    """Copies blocks to the tiers before they are evicted, on a thread and a few at a time.

    It holds no block: an eviction does not wait for it. What it has copied it keeps only if the block was not evicted
    before the copy was complete.
    """

    def __init__(
        self,
        stack: TierStack,
        engine: WorkerEngine,
        machine: Machine,
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
        defect: Callable[[Exception], None],
        follow: Callable[[], None],
    ) -> None:
        """`follow` is called on the thread, before blocks are looked for."""
        self._stack = stack
        self._engine = engine
        self._call_later = call_later
        self._defect = defect
        self._follow = follow
        self.thread = machine.thread("kv-demote")
        self._loop = asyncio.get_running_loop()
        memory = engine.cache
        at_once = max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // memory.block_bytes, memory.num_blocks))
        self.area = machine.staging_area(at_once, memory.block_bytes, memory.region(0).device)
        self._at_once = self.area.num_blocks
        self._round: Future[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = False
        self._closed = False
        self._copying = threading.Lock()
        """Held while blocks are copied out of the pool."""
        self._left_pool = False
        self.num_overtaken = 0
        """Blocks that were evicted while they were copied."""

    @property
    def idle(self) -> bool:
        """Returns whether there is nothing to do until the next step."""
        return self._round is None and self._timer is None and not self._due

    def stepped(self) -> None:
        """Notes that a step may have changed what is evicted next. It takes no time."""
        self._due = True
        if self._round is None and self._timer is None and not self._closed:
            self._begin()

    @property
    def underway(self) -> list[Future[bool]]:
        """Returns what the thread does now, if anything."""
        return [self._round] if self._round is not None else []

    def end(self) -> None:
        """Begins no more copies. Whoever calls it shuts the thread down, and closes the area after that."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def leave_pool(self) -> None:
        """Has the thread not touch the pool any more, whatever it does. A copy that has begun is waited for."""
        with self._copying:
            self._left_pool = True

    def _begin(self) -> None:
        self._due = False
        self._round = self.thread.submit(self._demote)
        self._round.add_done_callback(lambda _: _tell(self._loop, self._ended))

    def _ended(self) -> None:
        ended, self._round = self._round, None
        assert ended is not None
        if (error := ended.exception()) is not None:
            self._defect(error if isinstance(error, Exception) else RuntimeError(str(error)))
        elif ended.result() and not self._closed:
            self._begin()  # there is more to copy
            return
        if not self._closed:
            self._timer = self._call_later(_PAUSE_S, self._paused)

    def _paused(self) -> None:
        self._timer = None
        if self._due and not self._closed:
            self._begin()

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _demote(self) -> bool:
        """Copies some blocks that a tier takes. Returns whether there may be more."""
        self._follow()
        if not self._stack.is_writable:
            return False  # the blocks wait for the end of the pause, as long as they are there
        taken = self._engine.take_uncopied(self._at_once)
        blocks = [block for block in taken if self._stack.takes(block.hash)]
        if blocks:
            self._copy(blocks)
        return len(taken) == self._at_once

    def _copy(self, blocks: Sequence[CachedBlock]) -> None:
        with contextlib.ExitStack() as views:
            copies = [views.enter_context(self.area.slot(number)) for number in range(len(blocks))]
            with self._copying:
                if self._left_pool:
                    return
                self._engine.cache.copy_blocks([block.block_id for block in blocks], copies)
            same = self._engine.unchanged(blocks)
            self.num_overtaken += same.count(False)
            self._stack.write(
                [block.hash for block, is_same in zip(blocks, same, strict=True) if is_same],
                [copy for copy, is_same in zip(copies, same, strict=True) if is_same],
            )


class _Guarded:
    """Is a `BlockTarget` that can be taken away from whoever writes to it."""

    def __init__(self, memory: BlockTarget) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        """Held for one write at a time."""
        self._abandoned = False

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        """Replaces the bytes of the blocks. Raises ReadAbandoned once nobody waits for them."""
        with self._lock:
            if self._abandoned:
                raise ReadAbandoned
            self._memory.write_blocks(block_ids, data)

    def abandon(self) -> None:
        """Has nothing be written from now on. A write that has begun is waited for: it is that of one block."""
        with self._lock:
            self._abandoned = True


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Has the event loop call the function, unless it is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        log.debug("the event loop is closed", exc_info=True)
