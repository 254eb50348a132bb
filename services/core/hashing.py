"""Computes block hashes.

They are chained: a block's hash covers all tokens up to its end, so equal hashes mean equal KV. What the router
remembers of prompts and the engine's prefix cache must agree on them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes
"""The hash of one block, 16 bytes: long enough that a collision, which would serve another prompt's KV, is out of
reach."""


def root_hash(cache_salt: str = "") -> BlockHash:
    """Returns the parent hash of a sequence's first block. Sequences with different salts never share blocks."""
    return hashlib.blake2b(cache_salt.encode(), digest_size=16, person=b"baton-root").digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Returns the hash of one full block. `token_ids` are its block_size tokens, `parent` is the hash of the block
    before it."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16, key=parent).digest()


def block_hashes(token_ids: Sequence[int], block_size: int, cache_salt: str = "") -> list[BlockHash]:
    """Returns the hashes of all full blocks of `token_ids`, in order."""
    hashes = []
    parent = root_hash(cache_salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Returns how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
