"""Keeps the memory of `ScriptedEngine`, and what it makes of what is there. A token's "KV" is its id, in the pool's
memory; the next token is a hash of what that memory holds.

A token's "KV" is its id, in the pool's memory; the next token is a hash of what that memory holds. So a sequence that
reads a block of another, or one that was not copied, says something else.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from services.core.sealed_memory import SealedMemory
from services.kv.regions import Buffer, Region

_SLOT_BYTES = 8
_NUM_SPECIAL = 3
"""Token ids below are never said."""


def next_token(token_ids: Sequence[int], vocab_size: int) -> int:
    digest = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest()
    return _NUM_SPECIAL + int.from_bytes(digest, "little") % (vocab_size - _NUM_SPECIAL)


def script(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """Returns what every scripted engine says after the prompt."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, vocab_size))
    return token_ids[len(prompt) :]


class ScriptedMemory:
    """Implements a `BlockMemory` that peers can map."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_size * _SLOT_BYTES
        self._block_size = block_size
        self._memory = SealedMemory("scripted-kv", num_blocks * self.block_bytes)
        self._region = Region(self._memory.address, num_blocks * self.block_bytes, "cpu")
        self._bytes = memoryview(self._memory.map)
        self._slots = self._bytes.cast("q")

    @property
    def fd(self) -> int | None:
        return self._memory.fd

    def region(self, block_id: int) -> Region:
        return self._region.part(block_id * self.block_bytes, self.block_bytes)

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        return [self._block(block_id).toreadonly() for block_id in block_ids]

    def copy_blocks(self, block_ids: Sequence[int], targets: Sequence[memoryview]) -> None:
        for block_id, target in zip(block_ids, targets, strict=True):
            target[:] = self._block(block_id)

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        for block_id, each in zip(block_ids, data, strict=True):
            self._block(block_id)[:] = each

    def fill_blocks(self, block_ids: Sequence[int], fill: Callable[[Sequence[memoryview]], None]) -> None:
        fill([self._block(block_id) for block_id in block_ids])

    def put(self, block_ids: Sequence[int], start: int, token_ids: Sequence[int]) -> None:
        for position, token_id in enumerate(token_ids, start):
            self._slots[self._slot(block_ids, position)] = token_id

    def get(self, block_ids: Sequence[int], num_tokens: int) -> list[int]:
        return [self._slots[self._slot(block_ids, position)] for position in range(num_tokens)]

    def close(self) -> None:
        self._memory.close()

    def _block(self, block_id: int) -> memoryview:
        return self._bytes[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def _slot(self, block_ids: Sequence[int], position: int) -> int:
        return block_ids[position // self._block_size] * self._block_size + position % self._block_size
