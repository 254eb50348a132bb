"""Knows what stands in one worker's prefix cache, by what the worker tells and by what it was given lately. Pure.

Owns: a bounded memory for each worker, which policy may look at. It is a guess: the worker alone knows its cache, and a
prompt that is expected there but is not costs what it costs anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from services.core.hashing import ShortHash

_MOST_BLOCKS = 1 << 17
"""Of one worker: as many as a worker tells at once. 100 bytes each."""
_MOST_CONVERSATIONS = 4096
_EXPECTED_S = 10.0
"""A prompt is expected to be in the cache of the worker that was given it for at least so long, and at most twice, so
that prompts that begin alike and come together meet. After that, what the worker has told counts."""


class KnownCache:
    """Keeps the short hashes of blocks that one worker has, or is about to have."""

    def __init__(self, most_blocks: int, now: float) -> None:
        """`most_blocks` are those of the worker's pool: it caches no more."""
        self._most_blocks = min(most_blocks, _MOST_BLOCKS)
        self._told: set[ShortHash] = set()
        self._expected: set[ShortHash] = set()
        self._expected_before: set[ShortHash] = set()
        self._turn_s = now + _EXPECTED_S
        """When what is expected becomes what was expected before, and what was is forgotten."""
        self._conversations: dict[str, None] = {}

    def __len__(self) -> int:
        """Returns how many blocks the worker has told of."""
        return len(self._told)

    def tell(self, *, whole: bool, stored: Collection[ShortHash], removed: Iterable[ShortHash]) -> None:
        """Takes over what the worker tells; `whole` says that it has nothing else.

        What exceeds the worker's pool is left out: it cannot be true.
        """
        if whole:
            self._told = set()
        self._told.difference_update(removed)
        if len(self._told) + len(stored) <= self._most_blocks:
            self._told.update(stored)
        else:
            self._told.update(hash for hash, _ in zip(stored, range(self._most_blocks - len(self._told)), strict=False))

    def expect(self, hashes: Sequence[ShortHash], conversation: str) -> None:
        """Notes that the worker was given a prompt. `hashes` are those of its full blocks, in order; `conversation` is
        empty for none."""
        if len(self._expected) + len(hashes) > self._most_blocks:
            self._turn()
        self._expected.update(hashes[: self._most_blocks])
        if conversation:
            self._conversations.pop(conversation, None)
            self._conversations[conversation] = None
            if len(self._conversations) > _MOST_CONVERSATIONS:
                del self._conversations[next(iter(self._conversations))]

    def tick(self, now: float) -> None:
        """Forgets what was expected long ago. To be called now and then."""
        if now >= self._turn_s:
            self._turn()
            self._turn_s = now + _EXPECTED_S

    def num_blocks(self, hashes: Sequence[ShortHash]) -> int:
        """Returns how many of a prompt's first blocks are known or expected to be there."""
        told, expected, before = self._told, self._expected, self._expected_before
        # Whoever has a block has, but for rare cases, those before it: they are evicted later. So there is one place
        # from which on all are missing, and a prompt of two thousand blocks is looked up eleven times.
        low, high = 0, len(hashes)
        middle = 0
        while low < high:
            hash = hashes[middle]
            if hash in told or hash in expected or hash in before:
                low = middle + 1
            else:
                high = middle
            middle = (low + high) // 2
        return low

    def has_conversation(self, conversation: str) -> bool:
        return conversation in self._conversations

    def _turn(self) -> None:
        self._expected_before, self._expected = self._expected, set()
