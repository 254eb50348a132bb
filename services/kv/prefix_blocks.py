"""Lends and brings the blocks of prefixes, over the prefix index of a pool. Pure; the pool's lock is held.

Owns: which references are held from when to when. Never: the decision what is brought, or the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.core.hashing import BlockHash
from services.kv.pool import BlockPool, Holder


@dataclass(frozen=True, slots=True)
class PrefixReservation:
    """Names the blocks set aside to bring a prefix into, in the order of its hashes: first `found`, then `fresh`. The
    caller holds an IMPORT reference to each."""

    found: list[int]
    """Cached blocks, which need not be brought."""
    fresh: list[int]
    """Blocks to write to."""

    @property
    def block_ids(self) -> list[int]:
        return [*self.found, *self.fresh]


def lend(pool: BlockPool, hashes: Sequence[BlockHash]) -> list[int]:
    """Returns the blocks of the longest run from the start that is cached, with a LEASE reference to each."""
    block_ids = pool.match_prefix(hashes)
    pool.acquire(block_ids, Holder.LEASE)
    return block_ids


def reserve_prefix(pool: BlockPool, hashes: Sequence[BlockHash], check: Callable[[int], None]) -> PrefixReservation:
    """Sets blocks aside to bring a prefix into. `check(num_fresh)` raises if that number may not be taken.

    Raises what it raises, and OutOfBlocks; then no block is held.
    """
    found = pool.match_prefix(hashes)
    pool.acquire(found, Holder.IMPORT)
    try:
        num_fresh = len(hashes) - len(found)
        check(num_fresh)
        return PrefixReservation(found, pool.allocate(num_fresh, Holder.IMPORT))
    except BaseException:
        pool.release(found, Holder.IMPORT)
        raise


def keep_prefix(pool: BlockPool, reservation: PrefixReservation, hashes: Sequence[BlockHash]) -> None:
    """Indexes the first blocks of a reservation by these hashes, and drops all its references."""
    block_ids = reservation.block_ids
    pool.transfer(block_ids, Holder.IMPORT, Holder.SEQUENCE)  # imports are not indexed, what is READY is
    for block_id, hash in zip(block_ids, hashes, strict=False):
        pool.index(block_id, hash)
    pool.release(block_ids, Holder.SEQUENCE)
