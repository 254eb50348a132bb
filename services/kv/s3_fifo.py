"""Evicts blocks by S3-FIFO, so that blocks that nobody asks for again do not evict those that are shared. Pure.

Juncheng Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. Here a block that is in use is in no
queue, and comes back to the end of the one it was in: the paper's caches have nothing in use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from services.core.hashing import BlockHash

_SMALL_SHARE = 0.1
"""Share of the blocks that the small queue may have before it is the one to evict from."""
_MOST_USES = 3
"""Uses are counted as far as this."""

Queue = OrderedDict[BlockHash, int]
"""Uses of each block since it entered the queue, the first to leave first."""


class S3Fifo:
    """Has a small queue for blocks that are new, and a main one for those that were used again while they were in it or
    soon after they had left it. It is an `EvictionOrder`."""

    def __init__(self) -> None:
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._in_use: dict[BlockHash, tuple[Queue, int]] = {}
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()
        """Blocks that were evicted from the small queue, about as many as there are in both."""

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, hash: BlockHash) -> bool:
        return hash in self._small or hash in self._main

    def __iter__(self) -> Iterator[BlockHash]:
        unused = (hash for queue in (self._small, self._main) for hash, uses in queue.items() if not uses)
        return chain(unused, (hash for queue in (self._small, self._main) for hash, uses in queue.items() if uses))

    def add(self, hash: BlockHash) -> None:
        if hash in self._in_use:
            queue, uses = self._in_use.pop(hash)
            queue[hash] = uses
        elif hash in self._ghosts:
            del self._ghosts[hash]
            self._main[hash] = 0
        else:
            self._small[hash] = 0

    def use(self, hash: BlockHash) -> None:
        queue = self._queue_of(hash)
        self._in_use[hash] = (queue, min(_MOST_USES, queue.pop(hash) + 1))

    def touch(self, hash: BlockHash) -> None:
        queue = self._queue_of(hash)
        queue[hash] = min(_MOST_USES, queue[hash] + 1)

    def forget(self, hash: BlockHash) -> None:
        del self._queue_of(hash)[hash]

    def evict(self) -> BlockHash:
        while True:
            if self._small and (len(self._small) > _SMALL_SHARE * len(self) or not self._main):
                hash, uses = self._small.popitem(last=False)
                if not uses:
                    self._ghosts[hash] = None
                    while len(self._ghosts) > len(self) + 1:
                        self._ghosts.popitem(last=False)
                    return hash
                self._main[hash] = 0
            else:
                hash, uses = self._main.popitem(last=False)
                if not uses:
                    return hash
                self._main[hash] = uses - 1

    def _queue_of(self, hash: BlockHash) -> Queue:
        return self._small if hash in self._small else self._main
