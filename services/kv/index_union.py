"""Merges the prefix index of a pool with what the tiers below it hold, so that routers know of both. Pure; a lock of
the worker guards it.

Owns: which places have each hash, and which of the places count. Never: the places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.core.hashing import BlockHash
from services.kv.index_log import IndexChanges, IndexLog

_POOL = 1
"""The pool's bit. The tier of number n has the bit `_POOL << (n + 1)`."""


def _bit(tier: int) -> int:
    return _POOL << (tier + 1)


class IndexUnion:
    """Follows a pool's index and the tiers', and numbers the changes of what they have together. Tiers are numbered
    from 0."""

    def __init__(self, pool_changes: Callable[[int | None], IndexChanges | None]) -> None:
        """`pool_changes` is the engine's `index_changes`."""
        self._pool_changes = pool_changes
        self._told: int | None = None
        self._places: dict[BlockHash, int] = {}
        """Maps each hash to the bits of the places that have it; what came last is last."""
        self._hidden = 0
        """The bits of the tiers that do not count."""
        self._log = IndexLog()
        self.num_lost = 0
        """Blocks that left the pool and that no tier had."""

    def store(self, hash: BlockHash, tier: int) -> None:
        """Notes that the tier has the block now."""
        self._add(hash, _bit(tier))

    def remove(self, hash: BlockHash, tier: int) -> None:
        """Notes that the tier has the block no more."""
        self._drop(hash, _bit(tier))

    def count_tiers(self, usable: list[bool]) -> None:
        """Takes over whether each tier can be read. What only tiers have that cannot counts as gone."""
        hidden = sum(_bit(tier) for tier, is_usable in enumerate(usable) if not is_usable)
        if hidden != self._hidden:
            self._hidden = hidden
            self._log.start_over()

    def has(self, hash: BlockHash) -> bool:
        """Returns whether the pool has the block, or a tier that counts."""
        return bool(self._places.get(hash, 0) & ~self._hidden)

    def follow(self) -> None:
        """Takes over what has changed in the pool."""
        changes = self._pool_changes(self._told)
        if changes is None:
            return
        self._told = changes.number
        removed = changes.removed
        if changes.whole:
            stored = set(changes.stored)
            removed = tuple(hash for hash, places in self._places.items() if places & _POOL and hash not in stored)
        for hash in removed:
            if self._places.get(hash, 0) & _POOL:
                self._drop(hash, _POOL)
                self.num_lost += hash not in self._places
        for hash in changes.stored:
            self._add(hash, _POOL)

    def since(self, number: int | None) -> IndexChanges | None:
        """Returns what has changed after the change of that number, as `IndexLog.since` does."""
        self.follow()
        return self._log.since(number, self._indexed)

    def _indexed(self) -> Iterator[BlockHash]:
        """Yields what counts: first what is in the pool, since it was used last, then the newest of the tiers."""
        yield from (hash for hash, places in reversed(self._places.items()) if places & _POOL)
        shown = ~(self._hidden | _POOL)
        yield from (hash for hash, places in reversed(self._places.items()) if places & shown and not places & _POOL)

    def _add(self, hash: BlockHash, place: int) -> None:
        before = self._places.get(hash, 0)
        self._places[hash] = before | place
        if place & ~self._hidden and not before & ~self._hidden:
            self._log.store(hash, 0)

    def _drop(self, hash: BlockHash, place: int) -> None:
        before = self._places[hash]
        if rest := before & ~place:
            self._places[hash] = rest
        else:
            del self._places[hash]
        if before & ~self._hidden and not rest & ~self._hidden:
            self._log.remove(hash, 0)
