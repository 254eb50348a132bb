"""Provides a device without numbers: KV memory that remembers what each slot was computed from, and a model over it.

The KV of a position is a digest of all tokens up to it, so a slot is right only if its whole prefix was. The next token
is a function of that digest: a sequence's output depends on its tokens alone, however it was chunked or preempted.
"""

from __future__ import annotations

import zlib

from services.core.hashing import num_blocks_for
from services.engine.schedule.sequence import BlockCopy, Finish, SampledToken, ScheduledSequence, StoppingParams
from services.kv.pool import BlockPool, Holder

VOCAB_SIZE = 7
POISON = -1


def prompt(num_tokens: int, stem: int = 1) -> list[int]:
    return [stem] * num_tokens


def digests(token_ids: list[int], cache_salt: str = "") -> list[int]:
    """Returns the KV of each position."""
    found = []
    digest = zlib.crc32(cache_salt.encode())
    for token_id in token_ids:
        digest = zlib.crc32(token_id.to_bytes(4, "little"), digest)
        found.append(digest)
    return found


def next_token(digest: int, masked: tuple[int, ...] = (), seed: int = 0) -> int:
    allowed = [token_id for token_id in range(VOCAB_SIZE) if token_id not in masked]
    return allowed[(digest + seed) % len(allowed)]


def reference(
    token_ids: list[int],
    stopping: StoppingParams,
    *,
    max_model_len: int,
    output_base: int = 0,
    cache_salt: str = "",
    seed: int = 0,
) -> tuple[list[int], Finish]:
    """Returns the output of a run without chunks, sharing or faults."""
    tokens = list(token_ids)
    while True:
        position = output_base + len(tokens) - len(token_ids)
        masked = tuple(sorted(stopping.stop_token_ids)) if position < stopping.min_tokens else ()
        token_id = next_token(digests(tokens, cache_salt)[-1], masked, seed)
        tokens.append(token_id)
        output = tokens[len(token_ids) :]
        if token_id in stopping.stop_token_ids and position >= stopping.min_tokens:
            return output, Finish.STOP
        if position + 1 >= stopping.max_tokens or len(tokens) >= max_model_len:
            return output, Finish.LENGTH


class FakeDevice:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._slots: dict[tuple[int, int], int] = {}

    def read(self, block_ids: tuple[int, ...] | list[int], num_tokens: int) -> list[int]:
        size = self._pool.block_size
        return [self._slots.get((block_ids[at // size], at % size), POISON) for at in range(num_tokens)]

    def write(self, block_ids: tuple[int, ...] | list[int], start: int, values: list[int]) -> None:
        size = self._pool.block_size
        for at, value in enumerate(values, start):
            self._slots[block_ids[at // size], at % size] = value

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        for copy in copies:
            for at in range(self._pool.block_size):
                self._slots[copy.target, at] = self._slots.get((copy.source, at), POISON)

    def check_part(
        self, part: ScheduledSequence, token_ids: list[int], cache_salt: str, copies: tuple[BlockCopy, ...] = ()
    ) -> None:
        """It reads only computed positions, and writes only blocks that nobody else reads, but for the copies that the
        step has made before."""
        end = part.start + part.num_tokens
        size = self._pool.block_size
        assert part.num_tokens > 0
        assert list(part.token_ids) == token_ids[part.start : end]
        assert len(part.block_ids) == len(set(part.block_ids)) == num_blocks_for(end, size)
        assert self.read(part.block_ids, part.start) == digests(token_ids[: part.start], cache_salt)
        for block_id in part.block_ids[part.start // size :]:
            num_copied = sum(copy.source == block_id for copy in copies)
            assert self._pool.references(Holder.SEQUENCE, block_id) == 1 + num_copied, "written by one sequence"
            assert self._pool.references(Holder.IMPORT, block_id) == 0, "written by no copy"
            # A prompt being prefilled is leased already, but announced only as far as it is computed.
            assert self._pool.references(Holder.LEASE, block_id) <= 1, "read by no other lease"

    def run(self, part: ScheduledSequence, cache_salt: str) -> tuple[SampledToken, ...]:
        """Computes from what is in memory, right or wrong, as a device does. Returns a token for each row."""
        digest = self.read(part.block_ids, part.start)[-1] if part.start else zlib.crc32(cache_salt.encode())
        values = []
        for token_id in part.token_ids:
            digest = zlib.crc32(token_id.to_bytes(4, "little"), digest & 0xFFFFFFFF)
            values.append(digest)
        self.write(part.block_ids, part.start, values)
        return tuple(SampledToken(next_token(values[-1], row.masked_token_ids, row.sampling.seed)) for row in part.rows)

    def spoil(self, part: ScheduledSequence) -> None:
        """Overwrites what a step that raised may have written."""
        self.write(part.block_ids, part.start, [POISON] * part.num_tokens)
