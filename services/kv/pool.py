"""Keeps the holders of every block of the KV pool. Pure and not thread-safe: a lock of the engine guards it.

Owns: the state of every block id: reference counts by kind of holder, the prefix index, and eviction. Never: the memory
behind a block, tokens, or the decision which sequence gets a block.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from services.core.errors import Overloaded
from services.core.hashing import BlockHash
from services.kv.eviction import EvictionOrder, LeastRecentlyUsed


class OutOfBlocks(Overloaded):
    """Says that fewer blocks are available than were asked for. None was taken."""


class Holder(enum.IntEnum):
    """Names the kinds of holder of a reference. A block with a shared prefix may have several of several kinds."""

    IMPORT = 0
    LEASE = 1
    SEQUENCE = 2


class BlockClass(enum.IntEnum):
    """Names the one class of a block: the first that applies. The first three mean a `Holder` of equal value."""

    IMPORTING = 0
    LEASED = 1
    ACTIVE = 2
    CACHED = 3
    """The block has no reference but is indexed: it is found by its hash until it is evicted."""
    FREE = 4


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts the blocks of each class. The counts add up to the pool's size."""

    importing: int
    leased: int
    active: int
    cached: int
    free: int

    @property
    def total(self) -> int:
        return self.importing + self.leased + self.active + self.cached + self.free

    @property
    def idle(self) -> bool:
        """Says whether no block has a holder."""
        return self.importing == self.leased == self.active == 0


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """Names a cached block as it was at one time. Once it is evicted, it is another one, even if it gets its hash
    back."""

    hash: BlockHash
    block_id: int
    num_evictions: int
    """How often the block had been evicted before."""


IndexListener = Callable[[BlockHash, int], None]


def _ignore(hash: BlockHash, block_id: int) -> None:
    pass


class BlockPool:
    """Keeps the holders, the prefix index and the free blocks of `num_blocks` blocks of `block_size` tokens each.

    `on_index(hash, block_id)` and `on_evict(hash, block_id)` are called as blocks enter and leave the prefix index.
    `order` says which cached block is evicted next; by default the one that was used least recently.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        on_index: IndexListener | None = None,
        on_evict: IndexListener | None = None,
        order: EvictionOrder | None = None,
    ) -> None:
        assert num_blocks > 0, "a pool has blocks"
        assert block_size > 0, "a block has tokens"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._on_index = on_index or _ignore
        self._on_evict = on_evict or _ignore
        self._refs = tuple([0] * num_blocks for _ in Holder)
        self._num_refs = [0 for _ in Holder]
        self._num_of_class = [0 for _ in BlockClass]
        self._num_of_class[BlockClass.FREE] = num_blocks
        # A stack: freed blocks are used again first, so a lightly loaded pool touches little memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached = order if order is not None else LeastRecentlyUsed()
        self.num_used = 0
        """How many of the first blocks were ever allocated."""
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._num_evictions = [0] * num_blocks
        self._uncopied: dict[int, None] = {}
        """The cached blocks that `take_uncopied` has not returned, those cached longest first."""
        self._block_of: dict[BlockHash, int] = {}

    @property
    def num_available(self) -> int:
        """Returns how many blocks `allocate` could give: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    def take_uncopied(self, most: int) -> list[CachedBlock]:
        """Returns cached blocks for whoever copies them before they are evicted, those cached longest first; each once,
        until it has been in use again. There are none while half of the pool is free.

        They stay as they are: to read them without a reference is to ask afterwards which are `unchanged`.
        """
        if 2 * len(self._free) >= self.num_blocks:
            return []
        block_ids = list(islice(self._uncopied, most))
        for block_id in block_ids:
            del self._uncopied[block_id]
        return [
            CachedBlock(self._indexed_hash(block_id), block_id, self._num_evictions[block_id]) for block_id in block_ids
        ]

    def unchanged(self, block: CachedBlock) -> bool:
        """Returns whether the block has not been evicted since, so that its content is that of its hash still."""
        return self._num_evictions[block.block_id] == block.num_evictions

    def match_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Returns the blocks of the longest indexed run from the start of `hashes`.

        It takes no reference. `acquire` them before `allocate`, which could evict them.
        """
        matched: list[int] = []
        for hash in hashes:
            block_id = self._block_of.get(hash)
            if block_id is None:
                break
            matched.append(block_id)
        return matched

    def acquire(self, block_ids: Iterable[int], holder: Holder) -> None:
        """Adds one reference of that kind to each block. None may be free: such a block has no content to share."""
        for block_id in block_ids:
            assert self.class_of(block_id) is not BlockClass.FREE, f"block {block_id} is free"
            self._change(block_id, holder, +1)

    def allocate(self, num_blocks: int, holder: Holder) -> list[int]:
        """Returns fresh blocks with one reference each.

        If there are not enough free blocks, it evicts cached ones. Raises OutOfBlocks.
        """
        if num_blocks > self.num_available:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self.num_available} available")
        block_ids = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._change(block_id, holder, +1)
            self.num_used = max(self.num_used, block_id + 1)
        return block_ids

    def release(self, block_ids: Sequence[int], holder: Holder) -> None:
        """Drops one reference of that kind from each block. Without references a block is cached if indexed, else free.

        `block_ids` are in token order. They are released backwards, so that the tail of a sequence is evicted before
        its head: a head is useful without its tail, and shared more often.
        """
        for block_id in reversed(block_ids):
            self._change(block_id, holder, -1)

    def transfer(self, block_ids: Iterable[int], from_: Holder, to: Holder) -> None:
        """Changes the kind of one reference to each block, when an import is READY or a lease is adopted in place."""
        for block_id in block_ids:
            self._change(block_id, to, +1)
            self._change(block_id, from_, -1)

    def index(self, block_id: int, hash: BlockHash) -> None:
        """Adds a full block to the prefix index, after the step or the copy that wrote it has completed.

        From then on it is read-only. The first block of a hash is indexed; a later one stays private to its holders.
        """
        held = self._refs[Holder.SEQUENCE][block_id] or self._refs[Holder.LEASE][block_id]
        assert held, f"block {block_id} has no holder that could have written it"
        known = self._hash_of[block_id]
        assert known is None or known == hash, f"block {block_id} is indexed under another hash"
        if hash in self._block_of:
            return
        self._hash_of[block_id] = hash
        self._block_of[hash] = block_id
        self._on_index(hash, block_id)

    def indexed(self) -> Iterator[BlockHash]:
        """Yields the hashes of the prefix index, the newest first."""
        return reversed(self._block_of)

    def class_of(self, block_id: int) -> BlockClass:
        for holder, block_class in _CLASS_OF_HOLDER:
            if self._refs[holder][block_id]:
                return block_class
        return BlockClass.FREE if self._hash_of[block_id] is None else BlockClass.CACHED

    def ledger(self) -> Ledger:
        return Ledger(*self._num_of_class)

    def references(self, holder: Holder, block_id: int | None = None) -> int:
        """Returns the number of references of that kind, to one block or to all together."""
        return self._num_refs[holder] if block_id is None else self._refs[holder][block_id]

    def check(self) -> None:
        """Raises AssertionError unless counts, index and lists agree with the references. O(num_blocks)."""
        classes = [self.class_of(block_id) for block_id in range(self.num_blocks)]
        for block_class in BlockClass:
            assert self._num_of_class[block_class] == classes.count(block_class), f"count of {block_class.name}"
        for holder in Holder:
            assert min(self._refs[holder]) >= 0, f"negative references: {holder.name}"
            assert self._num_refs[holder] == sum(self._refs[holder]), f"sum of references: {holder.name}"
        cached = [block_id for block_id, found in enumerate(classes) if found is BlockClass.CACHED]
        free = [block_id for block_id, found in enumerate(classes) if found is BlockClass.FREE]
        assert sorted(self._block_of[hash] for hash in self._cached) == cached, (
            "evictable blocks are those of class cached"
        )
        assert sorted(self._free) == free, "the free list is those of class free"
        assert classes[self.num_used :].count(BlockClass.FREE) == self.num_blocks - self.num_used, "the rest is unused"
        indexed = {hash: block_id for block_id, hash in enumerate(self._hash_of) if hash is not None}
        assert indexed == self._block_of, "the index is one to one"

    def _change(self, block_id: int, holder: Holder, by: int) -> None:
        """Changes a block's references, and with them the counts and the lists of blocks without references.

        No other code changes references.
        """
        before = self.class_of(block_id)
        refs = self._refs[holder]
        refs[block_id] += by
        assert refs[block_id] >= 0, f"block {block_id} released more often than acquired by {holder.name}"
        self._num_refs[holder] += by
        after = self.class_of(block_id)
        if after is before:
            return
        self._num_of_class[before] -= 1
        self._num_of_class[after] += 1
        if before is BlockClass.CACHED:
            self._cached.use(self._indexed_hash(block_id))
            self._uncopied.pop(block_id, None)
        if after is BlockClass.CACHED:
            self._cached.add(self._indexed_hash(block_id))
            self._uncopied[block_id] = None
        elif after is BlockClass.FREE:
            self._free.append(block_id)

    def _indexed_hash(self, block_id: int) -> BlockHash:
        hash = self._hash_of[block_id]
        assert hash is not None, "a cached block is indexed"
        return hash

    def _evict(self) -> int:
        """Takes the cached block that is next out of the index. The caller references it at once."""
        hash = self._cached.evict()
        block_id = self._block_of.pop(hash)
        self._hash_of[block_id] = None
        self._num_evictions[block_id] += 1
        self._uncopied.pop(block_id, None)
        self._num_of_class[BlockClass.CACHED] -= 1
        self._num_of_class[BlockClass.FREE] += 1
        self._on_evict(hash, block_id)
        return block_id


_CLASS_OF_HOLDER = tuple((holder, BlockClass(holder)) for holder in Holder)
