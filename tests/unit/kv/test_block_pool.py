"""Tests the block pool: references, the prefix cache, eviction and the ledger."""

from __future__ import annotations

import pytest

from services.core.hashing import block_hashes
from services.kv.pool import BlockClass, BlockPool, Holder, Ledger, OutOfBlocks

HASHES = block_hashes(list(range(64)), 4)


def cached_run(pool: BlockPool, num_blocks: int, first_hash: int = 0) -> list[int]:
    """Returns the blocks of a finished sequence: they are indexed and unreferenced."""
    block_ids = pool.allocate(num_blocks, Holder.SEQUENCE)
    for block_id, hash in zip(block_ids, HASHES[first_hash:], strict=False):
        pool.index(block_id, hash)
    pool.release(block_ids, Holder.SEQUENCE)
    return block_ids


def test_blocks_are_free_at_first_and_again_after_their_last_reference() -> None:
    pool = BlockPool(4, 4)
    assert pool.ledger() == Ledger(0, 0, 0, 0, 4)
    block_ids = pool.allocate(3, Holder.SEQUENCE)
    assert pool.ledger() == Ledger(0, 0, 3, 0, 1)
    assert pool.num_available == 1
    pool.release(block_ids, Holder.SEQUENCE)
    assert pool.ledger().idle
    assert pool.num_available == 4
    pool.check()


def test_allocation_takes_all_or_nothing() -> None:
    pool = BlockPool(4, 4)
    cached_run(pool, 2)
    held = pool.allocate(1, Holder.SEQUENCE)
    before = pool.ledger()
    with pytest.raises(OutOfBlocks):
        pool.allocate(4, Holder.SEQUENCE)
    assert pool.ledger() == before
    assert pool.match_prefix(HASHES[:2]) != []
    assert held not in pool.allocate(3, Holder.SEQUENCE)
    pool.check()


@pytest.mark.parametrize(
    ("holders", "expected"),
    [
        ([Holder.SEQUENCE], BlockClass.ACTIVE),
        ([Holder.SEQUENCE, Holder.LEASE], BlockClass.LEASED),
        ([Holder.SEQUENCE, Holder.LEASE, Holder.IMPORT], BlockClass.IMPORTING),
        ([Holder.IMPORT, Holder.SEQUENCE], BlockClass.IMPORTING),
    ],
)
def test_the_first_class_that_applies(holders: list[Holder], expected: BlockClass) -> None:
    pool = BlockPool(2, 4)
    block_ids = pool.allocate(1, holders[0])
    for holder in holders[1:]:
        pool.acquire(block_ids, holder)
    assert pool.class_of(block_ids[0]) is expected
    pool.check()
    for holder in holders:
        assert pool.references(holder) == pool.references(holder, block_ids[0]) == 1
        pool.release(block_ids, holder)
    assert pool.class_of(block_ids[0]) is BlockClass.FREE
    pool.check()


def test_an_indexed_block_is_cached_after_its_last_reference_and_found_by_its_hash() -> None:
    pool = BlockPool(4, 4)
    block_ids = cached_run(pool, 2)
    assert pool.ledger() == Ledger(0, 0, 0, 2, 2)
    assert pool.match_prefix(HASHES) == block_ids
    pool.acquire(block_ids, Holder.SEQUENCE)
    assert pool.ledger() == Ledger(0, 0, 2, 0, 2)
    assert pool.num_available == 2, "referenced blocks are never evicted"
    pool.check()


def test_a_match_ends_at_the_first_missing_block() -> None:
    pool = BlockPool(4, 4)
    block_ids = pool.allocate(3, Holder.SEQUENCE)
    pool.index(block_ids[0], HASHES[0])
    pool.index(block_ids[2], HASHES[2])
    assert pool.match_prefix(HASHES[:3]) == block_ids[:1]
    assert pool.match_prefix(HASHES[1:]) == []


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    evicted: list[int] = []
    pool = BlockPool(3, 4, on_evict=lambda hash, block_id: evicted.append(block_id))
    block_ids = cached_run(pool, 3)
    pool.allocate(2, Holder.SEQUENCE)
    assert evicted == [block_ids[2], block_ids[1]]
    assert pool.match_prefix(HASHES) == block_ids[:1]
    pool.check()


def test_the_least_recently_used_sequence_is_evicted_first() -> None:
    pool = BlockPool(4, 4)
    old, recent = cached_run(pool, 2, 0), cached_run(pool, 2, 4)
    pool.acquire(old, Holder.SEQUENCE)  # used again: now the recent one is older
    pool.release(old, Holder.SEQUENCE)
    pool.allocate(2, Holder.SEQUENCE)
    assert pool.match_prefix(HASHES) == old
    assert pool.match_prefix(HASHES[4:]) == []
    assert len(recent) == 2


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4, 4)
    cached_run(pool, 2)
    pool.allocate(2, Holder.IMPORT)
    assert pool.ledger() == Ledger(2, 0, 0, 2, 0)


def test_the_first_writer_of_a_hash_wins() -> None:
    told: list[int] = []
    pool = BlockPool(4, 4, on_index=lambda hash, block_id: told.append(block_id))
    first, twin = pool.allocate(2, Holder.SEQUENCE)
    pool.index(first, HASHES[0])
    pool.index(twin, HASHES[0])
    pool.index(first, HASHES[0])  # again: nothing new
    assert told == [first]
    pool.release([twin, first], Holder.SEQUENCE)
    assert pool.class_of(twin) is BlockClass.FREE
    assert pool.class_of(first) is BlockClass.CACHED
    pool.check()


def test_references_change_kind_without_the_block_becoming_available() -> None:
    pool = BlockPool(2, 4)
    block_ids = pool.allocate(2, Holder.IMPORT)
    pool.transfer(block_ids, Holder.IMPORT, Holder.SEQUENCE)
    assert pool.ledger() == Ledger(0, 0, 2, 0, 0)
    assert (pool.references(Holder.IMPORT), pool.references(Holder.SEQUENCE)) == (0, 2)
    pool.check()


def test_misuse_is_an_invariant_broken() -> None:
    pool = BlockPool(2, 4)
    (block_id,) = pool.allocate(1, Holder.IMPORT)
    with pytest.raises(AssertionError, match="is free"):
        pool.acquire([1 - block_id], Holder.SEQUENCE)
    with pytest.raises(AssertionError, match="no holder that could have written it"):
        pool.index(block_id, HASHES[0])  # an import indexes only once it is READY
    pool.transfer([block_id], Holder.IMPORT, Holder.SEQUENCE)
    pool.index(block_id, HASHES[0])
    with pytest.raises(AssertionError, match="another hash"):
        pool.index(block_id, HASHES[1])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([block_id], Holder.LEASE)
