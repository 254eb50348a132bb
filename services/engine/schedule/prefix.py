"""Decides which full blocks of a sequence may come from the prefix cache, and which are indexed there.

Owns: what is added to `Sequence.hashes`. Never: references to blocks. Pure.
"""

from __future__ import annotations

from services.core.hashing import BlockHash, block_hash, root_hash
from services.engine.schedule.sequence import Sequence
from services.kv.pool import BlockPool


def hash_prompt(sequence: Sequence, block_size: int) -> None:
    """Computes the hashes of the sequence's full blocks, 0.1 ms for each thousand tokens.

    The engine does this before it takes the lock under which `cacheable_prefix` and `index_computed` need them.
    """
    _extend_hashes(sequence, len(sequence.token_ids) // block_size, block_size)


def cacheable_prefix(sequence: Sequence, block_size: int) -> list[BlockHash]:
    """Returns the hashes of the blocks that may come from the prefix cache: the first (n - 1) // block_size.

    So of the sequence's n tokens at least one remains to be computed, whose logits are sampled, and it lies in a block
    that only this sequence holds: a shared block is never written. A sequence whose prompt is still to be scored takes
    none, since scoring needs the logits of all its tokens.
    """
    if not sequence.is_scored:
        return []
    num_blocks = (len(sequence.token_ids) - 1) // block_size
    _extend_hashes(sequence, num_blocks, block_size)
    return sequence.hashes[:num_blocks]


def index_computed(pool: BlockPool, sequence: Sequence, num_indexed_tokens: int) -> None:
    """Indexes the full blocks between token `num_indexed_tokens` and token `num_computed`. The steps that wrote them
    have completed."""
    first, end = num_indexed_tokens // pool.block_size, sequence.num_computed // pool.block_size
    if first == end:
        return
    _extend_hashes(sequence, end, pool.block_size)
    for at in range(first, end):
        pool.index(sequence.block_ids[at], sequence.hashes[at])


def _extend_hashes(sequence: Sequence, num_blocks: int, block_size: int) -> None:
    """Adds hashes until the sequence has those of its first `num_blocks` blocks."""
    hashes = sequence.hashes
    for at in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else root_hash(sequence.cache_salt)
        hashes.append(block_hash(parent, sequence.token_ids[at * block_size : (at + 1) * block_size]))
