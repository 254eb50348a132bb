"""Keeps which block lies in which slot of a tier. Pure and not thread-safe: a lock of the tier guards it.

Owns: the slots' states, and which block makes room for another. Never: the bytes in a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from services.core.hashing import BlockHash
from services.kv.eviction import EvictionOrder


def _ignore(hash: BlockHash) -> None:
    pass


class TierIndex:
    """Gives out the slots of a tier, numbered from 0. A slot is free, being written, or holds the block of one hash."""

    def __init__(self, num_slots: int, order: EvictionOrder) -> None:
        assert num_slots > 0, "a tier has slots"
        self.num_slots = num_slots
        self._on_store: Callable[[BlockHash], None] = _ignore
        self._on_remove: Callable[[BlockHash], None] = _ignore
        self._order = order
        self._slot_of: dict[BlockHash, int] = {}
        # A stack with the lowest slot on top, so that a file grows from its start.
        self._free = list(range(num_slots - 1, -1, -1))
        self._writing: set[int] = set()

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, hash: BlockHash) -> bool:
        return hash in self._slot_of

    def follow(self, on_store: Callable[[BlockHash], None], on_remove: Callable[[BlockHash], None]) -> None:
        """Has these called as blocks enter and leave the index from now on; for those that are held already, `on_store`
        at once."""
        self._on_store, self._on_remove = on_store, on_remove
        for hash in self.held():
            on_store(hash)

    def held(self) -> Iterator[BlockHash]:
        """Yields the hashes of all blocks, the newest first."""
        return reversed(self._slot_of)

    def num_held(self, hashes: Sequence[BlockHash]) -> int:
        """Returns how many blocks from the first on are held."""
        for number, hash in enumerate(hashes):
            if hash not in self._slot_of:
                return number
        return len(hashes)

    def find(self, hash: BlockHash) -> int | None:
        """Returns the block's slot, or None. The block counts as used."""
        slot = self._slot_of.get(hash)
        if slot is not None:
            self._order.touch(hash)
        return slot

    def is_in(self, slot: int, hash: BlockHash) -> bool:
        """Returns whether that slot holds that block."""
        return self._slot_of.get(hash) == slot

    def take(self) -> int | None:
        """Returns a slot to write to, for which a block may be evicted; None if all others are being written too."""
        if not self._free:
            if not self._slot_of:
                return None
            self._remove(self._order.evict())
        slot = self._free.pop()
        self._writing.add(slot)
        return slot

    def put(self, slot: int, hash: BlockHash) -> None:
        """Notes that the slot, which was taken, is written and holds the block. If another one does, it is free."""
        self._writing.remove(slot)
        if hash in self._slot_of:
            self._free.append(slot)
            return
        self._slot_of[hash] = slot
        self._order.add(hash)
        self._on_store(hash)

    def give_back(self, slot: int) -> None:
        """Notes that a slot that was taken holds nothing."""
        self._writing.remove(slot)
        self._free.append(slot)

    def drop(self, slot: int, hash: BlockHash) -> None:
        """Removes the block if that slot still holds it: what is there is not what it should be."""
        if self.is_in(slot, hash):
            self._order.forget(hash)
            self._remove(hash)

    def restore(self, found: Iterable[tuple[int, BlockHash]]) -> int:
        """Notes which slots of an empty index have been found to hold which blocks; of a block that is in several, the
        first counts. Returns how many blocks there are."""
        assert not self._slot_of, "an index is restored before blocks are put into it"
        for slot, hash in found:
            self._slot_of.setdefault(hash, slot)
        taken = {*self._slot_of.values(), *self._writing}
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in taken]
        for hash in self._slot_of:
            self._order.add(hash)
            self._on_store(hash)
        return len(self._slot_of)

    def clear(self) -> None:
        """Removes every block."""
        for slot, hash in [(slot, hash) for hash, slot in self._slot_of.items()]:
            self.drop(slot, hash)

    def check(self) -> None:
        """Raises AssertionError unless each slot is in exactly one state and the order has what is held."""
        slots = [*self._free, *self._writing, *self._slot_of.values()]
        assert sorted(slots) == list(range(self.num_slots)), "each slot is in one state"
        assert set(self._order) == set(self._slot_of), "what is held can be evicted"
        assert len(self._order) == len(self._slot_of), "the order has no block twice"

    def _remove(self, hash: BlockHash) -> None:
        self._free.append(self._slot_of.pop(hash))
        self._on_remove(hash)
