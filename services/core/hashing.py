"""Computes block hashes.

They are chained: a block's hash covers all tokens up to its end, so equal hashes mean equal KV. What the router
remembers of prompts and the engine's prefix cache must agree on them.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence

BlockHash = bytes
"""The hash of one block, 16 bytes: long enough that a collision, which would serve another prompt's KV, is out of
reach."""

ShortHash = int
"""The first half of a block's hash as a number: what routers know of caches. Two blocks that share one, of which there
are a handful among billions, are mistaken for one another in a guess about caches, and nowhere else."""

_ANCHOR_BITS = 4
_NO_ANCHOR = (1 << _ANCHOR_BITS) - 1

HASH_BYTES = 8
"""The length of a short hash as it travels."""


_SEPARATOR = "\x1f"
"""Between a salt and the epoch; no client's salt may have it."""


def salt_in(epoch: str, cache_salt: str) -> str:
    """Returns the salt with which blocks are hashed in that epoch."""
    return f"{cache_salt}{_SEPARATOR}{epoch}" if epoch else cache_salt


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


class PromptHashes(tuple[ShortHash, ...]):
    """Holds the short hashes of a prompt's full blocks, in order, and which of them are anchors."""

    anchors: tuple[int, ...]
    """Their places."""
    anchor_keys: tuple[int, ...]

    def __new__(cls, hashes: Iterable[ShortHash] = ()) -> PromptHashes:
        self = super().__new__(cls, hashes)
        self.anchors = tuple([place for place, hash in enumerate(self) if not hash & _NO_ANCHOR])
        self.anchor_keys = tuple(anchor_keys(self))
        return self


def anchor_keys(hashes: Iterable[ShortHash]) -> list[int]:
    """Returns the keys of those that are anchors: the sixteenth part of all hashes that is looked for first. The hash
    alone says whether it is one; its key is a smaller number that tells it from the others."""
    return [hash >> _ANCHOR_BITS for hash in hashes if not hash & _NO_ANCHOR]


def short_hashes(hashes: Iterable[BlockHash]) -> PromptHashes:
    """Returns the first half of each hash."""
    return PromptHashes(unpack_hashes(pack_hashes(hashes)))


def pack_hashes(hashes: Iterable[BlockHash]) -> bytes:
    """Returns the first halves of the hashes one after another, 8 bytes each, as they travel."""
    return b"".join(hash[:HASH_BYTES] for hash in hashes)


def unpack_hashes(data: bytes) -> tuple[ShortHash, ...]:
    """Returns the numbers that `pack_hashes` has packed. Raises ValueError unless they are whole."""
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are no hashes of {HASH_BYTES} bytes")
    return struct.unpack(f"<{len(data) // HASH_BYTES}Q", data)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Returns how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
