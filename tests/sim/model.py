"""A model without numbers: the KV of a token is a digest of all tokens up to it, the next token a function of that.

So a sequence's output depends on its whole history and on nothing else, and a KV slot is right only if its whole prefix
was. `Truth` knows in advance what every request must get, and what every block that may ever be indexed must hold.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from services.core.hashing import BlockHash, block_hashes

VOCAB_SIZE = 53
EOS = 0
_SLOT = struct.Struct("<II")
SLOT_BYTES = _SLOT.size


def root_digest(cache_salt: str) -> int:
    return zlib.crc32(cache_salt.encode()) or 1


def digest_after(digest: int, token_id: int) -> int:
    return zlib.crc32(token_id.to_bytes(2, "little"), digest) or 1


def slot(digest: int, position: int) -> bytes:
    return _SLOT.pack(digest, position + 1)


def digest_in(slot_bytes: bytes | memoryview) -> int:
    """0 in a slot that was never written."""
    return int(_SLOT.unpack(slot_bytes)[0])


def next_token(digest: int, masked: Sequence[int] = ()) -> int:
    allowed = [token_id for token_id in range(VOCAB_SIZE) if token_id not in masked] if masked else range(VOCAB_SIZE)
    return allowed[zlib.crc32(digest.to_bytes(4, "little")) % len(allowed)]


class History:
    """Tokens, and the KV they must have."""

    def __init__(self, cache_salt: str) -> None:
        self.kv = bytearray()
        self.digest = root_digest(cache_salt)
        self.num_tokens = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.digest = digest_after(self.digest, token_id)
            self.kv += slot(self.digest, self.num_tokens)
            self.num_tokens += 1


@dataclass(frozen=True)
class Expected:
    """The output of a run without faults."""

    token_ids: tuple[int, ...]
    stop_token_id: int | None
    """None: it ends for length."""


class Truth:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.kv_of: dict[BlockHash, bytes] = {}

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        cache_salt: str = "",
    ) -> Expected:
        history = History(cache_salt)
        history.extend(prompt)
        output: list[int] = []
        stop_token_id = None
        while len(output) < max_tokens and stop_token_id is None:
            masked = sorted(stop_token_ids) if len(output) < min_tokens else ()
            token_id = next_token(history.digest, masked)
            if token_id in stop_token_ids:
                stop_token_id = token_id
            output.append(token_id)
            history.extend([token_id])
        self._remember([*prompt, *output], history, cache_salt)
        return Expected(tuple(output), stop_token_id)

    def _remember(self, token_ids: list[int], history: History, cache_salt: str) -> None:
        size = self.block_size * SLOT_BYTES
        for at, hash in enumerate(block_hashes(token_ids, self.block_size, cache_salt)):
            self.kv_of[hash] = bytes(history.kv[at * size : (at + 1) * size])
