"""Knows what stands in one worker's prefix cache, by what the worker tells and by what it was given lately. Pure.

Owns: a bounded memory for each worker, which policy may look at. It is a guess: the worker alone knows its cache, and a
prompt that is expected there but is not costs what it costs anywhere.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from services.core.hashing import ShortHash

_MOST_BLOCKS = 1 << 17
"""Of one worker: as many as a worker tells at once. 100 bytes each."""
_MOST_CONVERSATIONS = 4096
_EXPECTED_S = 10.0
"""A prompt is expected to be in the cache of the worker that was given it for at least so long, and at most twice, so
that prompts that begin alike and come together meet; for less, if the worker is given more blocks meanwhile than it can
cache. After that, what the worker has told counts."""


_MOST_TIMES = 4
"""So many times the blocks that a worker can cache are kept of prompts that share blocks."""
_MOST_ALIKE = 32
"""The most expected prompts with one beginning that are kept, the newest: whoever came before has been told of since,
or waits behind them."""


class KnownCache:
    """Keeps the short hashes of blocks that one worker has, or is about to have."""

    def __init__(self, most_blocks: int, now: float) -> None:
        """`most_blocks` are those of the worker's pool: it caches no more."""
        self._most_blocks = min(most_blocks, _MOST_BLOCKS)
        self._told: dict[ShortHash, None] = {}
        """A set would take up to half as much again."""
        self._expected, self._expected_before = _Prompts(), _Prompts()
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
        told = self._told = {} if whole else self._told
        for hash in removed:
            told.pop(hash, None)
        if len(told) + len(stored) > self._most_blocks:
            stored = list(itertools.islice(stored, self._most_blocks - len(told)))
        told.update(dict.fromkeys(stored))

    def expect(self, hashes: Sequence[ShortHash], conversation: str) -> None:
        """Notes that the worker was given a prompt. `hashes` are those of its full blocks, in order; `conversation` is
        empty for none."""
        expected = self._expected
        if max(expected.num_blocks, expected.num_hashes // _MOST_TIMES) + len(hashes) > self._most_blocks:
            self._turn()
        self._expected.add(hashes[: self._most_blocks])
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

    def num_blocks(self, hashes: Sequence[ShortHash], guess: int = 0) -> int:
        """Returns how many of a prompt's first blocks are known or expected to be there. `guess` is how many others
        have: that is looked at first."""
        if not hashes:
            return 0
        first = hashes[0]
        known = self._num_told(hashes, guess) if first in self._told else 0
        for prompts in (self._expected, self._expected_before):
            if alike := prompts.by_first.get(first):
                known = _extended(hashes, known, alike)
        return known

    def has_conversation(self, conversation: str) -> bool:
        return conversation in self._conversations

    def _num_told(self, hashes: Sequence[ShortHash], guess: int) -> int:
        """Returns how many of the blocks the worker has told of, which has the first of them."""
        # Whoever has a block has, but for rare cases, those before it: they are evicted later. So there is one place
        # from which on all are missing. Most workers have nothing, all of it, or what many prompts begin with, and so
        # as much as another: three looks tell. Else a prompt of two thousand blocks is looked up a dozen times.
        told, low, high = self._told, 1, len(hashes)
        middle, is_first = max(1, min(guess, high - 1)), True
        while low < high:
            if hashes[middle] in told:
                low = middle + 1
            else:
                high = middle
            middle, is_first = high - 1 if is_first else (low + high) // 2, False
        return low

    def _turn(self) -> None:
        self._expected_before, self._expected = self._expected, _Prompts()


class _Prompts:
    """Keeps the blocks of prompts, by the first of each."""

    def __init__(self) -> None:
        self.num_blocks = 0
        """Those that several prompts share are counted once."""
        self.num_hashes = 0
        """Those that are kept: of each prompt its own."""
        self.by_first: dict[ShortHash, deque[Sequence[ShortHash]]] = {}

    def add(self, hashes: Sequence[ShortHash]) -> None:
        if hashes:
            alike = self.by_first.setdefault(hashes[0], deque(maxlen=_MOST_ALIKE))
            self.num_blocks += len(hashes) - _extended(hashes, 0, alike)
            self.num_hashes += len(hashes)
            alike.append(hashes)


def _extended(hashes: Sequence[ShortHash], known: int, prompts: Iterable[Sequence[ShortHash]]) -> int:
    """Returns how many of the first blocks are known if `known` of them are, and those of these prompts."""
    for other in prompts:
        high = min(len(hashes), len(other))
        if known < high and other[known] == hashes[known]:
            known += 1  # a block's hash stands for those before it too, so that equal ones have equal beginnings
            while known < high:
                middle = (known + high) // 2
                if other[middle] == hashes[middle]:
                    known = middle + 1
                else:
                    high = middle
    return known
