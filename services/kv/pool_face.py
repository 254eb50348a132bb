"""Gives workers their engine's block pool: what leases, imports and prefixes need of it is the same for every engine.

Pure; the lock is the engine's. Owns: that each act happens under the lock. Never: sequences, or the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager
from typing import Any

from services.core.hashing import BlockHash
from services.kv.eviction import EvictionOrder
from services.kv.handoff_admission import EngineRoom
from services.kv.index_log import IndexChanges, IndexLog
from services.kv.pool import BlockPool, CachedBlock, Holder
from services.kv.prefix_blocks import PrefixReservation, keep_prefix, lend, reserve_prefix


class PoolFace:
    """Implements what a `WorkerEngine` has for the blocks that no sequence of its own holds."""

    def __init__(
        self, num_blocks: int, block_size: int, lock: AbstractContextManager[Any], order: EvictionOrder | None = None
    ) -> None:
        """`order` says which cached block is evicted next; by default the one that was used least recently."""
        self._lock = lock
        """Guards the pool. It is held for microseconds, never during a step."""
        self._index_log = IndexLog()
        self._pool = BlockPool(
            num_blocks, block_size, on_index=self._index_log.store, on_evict=self._index_log.remove, order=order
        )

    def release(self, block_ids: Iterable[int], holder: Holder) -> None:
        """Drops one reference of `holder` to each block (see `WorkerEngine.release`)."""
        with self._lock:
            self._pool.release(list(block_ids), holder)
        self._blocks_freed()

    def num_cached(self, hashes: Many[BlockHash]) -> int:
        """Returns how many of the blocks are cached (see `WorkerEngine.num_cached`)."""
        with self._lock:
            return len(self._pool.match_prefix(hashes))

    def lend(self, hashes: Many[BlockHash]) -> list[int]:
        """Returns cached blocks with references to them (see `WorkerEngine.lend`)."""
        with self._lock:
            return lend(self._pool, hashes)

    def reserve_prefix(self, hashes: Many[BlockHash], check: Callable[[int, EngineRoom], None]) -> PrefixReservation:
        """Sets blocks aside to bring a prefix into (see `WorkerEngine.reserve_prefix`)."""
        with self._lock:
            return reserve_prefix(self._pool, hashes, lambda num_fresh: check(num_fresh, self._room()))

    def keep_prefix(self, reservation: PrefixReservation, hashes: Many[BlockHash]) -> None:
        """Adds blocks that were brought to the prefix cache (see `WorkerEngine.keep_prefix`)."""
        with self._lock:
            keep_prefix(self._pool, reservation, hashes)
        self._blocks_freed()

    def take_uncopied(self, most: int) -> list[CachedBlock]:
        """Returns cached blocks to copy (see `WorkerEngine.take_uncopied`)."""
        with self._lock:
            return self._pool.take_uncopied(most)

    def unchanged(self, blocks: Many[CachedBlock]) -> list[bool]:
        """Returns which blocks were not evicted (see `WorkerEngine.unchanged`)."""
        with self._lock:
            return [self._pool.unchanged(block) for block in blocks]

    def index_changes(self, after: int | None) -> IndexChanges | None:
        """Returns what has changed in the prefix index (see `WorkerEngine.index_changes`)."""
        if after == self._index_log.number:
            return None  # most steps change nothing, and need no lock to say so
        with self._lock:
            return self._index_log.since(after, self._pool.indexed)

    def _room(self) -> EngineRoom:
        """Returns the room as of now; the caller has the lock."""
        raise NotImplementedError

    def _blocks_freed(self) -> None:
        """Is called after blocks were released: sequences that wait for blocks may fit now."""
