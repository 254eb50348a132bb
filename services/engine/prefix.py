"""Which full blocks of a sequence may come from the prefix index, and which go into it.

Owns: the growth of `Sequence.hashes`. Never: references. Pure.
"""

from __future__ import annotations

from services.core.hashing import BlockHash, block_hash, root_hash
from services.engine.block_pool import BlockPool
from services.engine.sequence import Sequence


def cacheable_prefix(sequence: Sequence, block_size: int) -> list[BlockHash]:
    """Hashes of the blocks that admission may skip: (n - 1) // block_size of them.

    So at least one token remains to be computed, whose logits are sampled, and it lies in a block of the sequence's
    own: a shared block is never written.
    """
    num_blocks = (len(sequence.token_ids) - 1) // block_size
    _extend_hashes(sequence, num_blocks, block_size)
    return sequence.hashes[:num_blocks]


def index_computed(pool: BlockPool, sequence: Sequence, num_indexed_tokens: int) -> None:
    """Indexes the full blocks between `num_indexed_tokens` and `num_computed`, whose writing steps have completed."""
    first, end = num_indexed_tokens // pool.block_size, sequence.num_computed // pool.block_size
    if first == end:
        return
    _extend_hashes(sequence, end, pool.block_size)
    for at in range(first, end):
        pool.index(sequence.block_ids[at], sequence.hashes[at])


def _extend_hashes(sequence: Sequence, num_blocks: int, block_size: int) -> None:
    hashes = sequence.hashes
    for at in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else root_hash(sequence.cache_salt)
        hashes.append(block_hash(parent, sequence.token_ids[at * block_size : (at + 1) * block_size]))
