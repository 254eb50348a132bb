"""Numbers the changes of a prefix index, so that others can follow it. Pure; the lock over its pool guards it.

Owns: the newest changes, and what they come to for a follower that has seen the earlier ones. Never: who follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from services.core.hashing import BlockHash

MOST_INDEXED = 1 << 17
"""The most hashes of which a follower is told at once: of a larger index, the newest."""
_MOST_CHANGES = 1 << 14
"""Changes that are kept. A follower that is further behind is told the whole index."""


@dataclass(frozen=True, slots=True)
class IndexChanges:
    """Says what an index has that it had not, and the reverse. No hash is in both."""

    number: int
    """The number of the last change in it."""
    whole: bool
    """Whether `stored` is all that the index has (as far as `MOST_INDEXED` allows), whatever it had before."""
    stored: tuple[BlockHash, ...]
    """The newest last."""
    removed: tuple[BlockHash, ...]


class IndexLog:
    """Keeps the newest changes of one index, numbered from 1: `store` and `remove` are the listeners of a pool."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the newest change; 0 before the first."""
        self._changes: deque[tuple[BlockHash, bool]] = deque(maxlen=_MOST_CHANGES)

    def store(self, hash: BlockHash, block_id: int) -> None:
        """Notes that the index has the hash from now on."""
        self.number += 1
        self._changes.append((hash, True))

    def remove(self, hash: BlockHash, block_id: int) -> None:
        """Notes that the index has the hash no more."""
        self.number += 1
        self._changes.append((hash, False))

    def start_over(self) -> None:
        """Notes that much has changed at once: every follower is told the whole index."""
        self.number += 1
        self._changes.clear()

    def since(self, number: int | None, indexed: Callable[[], Iterable[BlockHash]]) -> IndexChanges | None:
        """Returns what has changed after the change of that number, or None if nothing has; None as a number asks for
        the whole index.

        `indexed` returns all that the index has, the newest first. It is called where the changes themselves are not
        enough.
        """
        if number == self.number:
            return None
        if number is None or number < self.number - len(self._changes):
            newest = tuple(islice(indexed(), MOST_INDEXED))
            return IndexChanges(self.number, True, newest[::-1], ())
        num_old = number - (self.number - len(self._changes))
        last = dict(islice(self._changes, num_old, None))
        stored = tuple(hash for hash, there in last.items() if there)
        removed = tuple(hash for hash, there in last.items() if not there)
        return IndexChanges(self.number, False, stored, removed)
