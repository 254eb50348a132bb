"""Tells one router how the worker's prefix cache changes, in messages of a bounded size.

Owns: how far that router has been told. Never: what is in the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from baton.v1 import worker_pb2
from services.core.hashing import pack_hashes
from services.kv.index_log import IndexChanges

_MOST_HASHES = 1 << 13
"""One message carries no more, 64 KiB: a session's messages carry tokens too, which must not wait."""


class CacheFollower:
    """Takes the changes of a prefix cache, for one session."""

    def __init__(self, index_changes: Callable[[int | None], IndexChanges | None]) -> None:
        """`index_changes` is the engine's."""
        self._index_changes = index_changes
        self._told: int | None = None
        """The number of the last change that was taken; None before the first."""
        self._unsent: deque[worker_pb2.CacheEvents] = deque()
        self._num_sent = 0

    @property
    def has_more(self) -> bool:
        """Returns whether changes that were taken are left for the next message."""
        return bool(self._unsent)

    def take(self) -> worker_pb2.CacheEvents | None:
        """Returns what the router is to be told next, or None if the cache has not changed."""
        if not self._unsent and (changes := self._index_changes(self._told)) is not None:
            self._told = changes.number
            self._unsent.extend(_parts(changes))
        if not self._unsent:
            return None
        self._num_sent += 1
        events = self._unsent.popleft()
        events.number = self._num_sent
        return events


def _parts(changes: IndexChanges) -> Iterator[worker_pb2.CacheEvents]:
    """Yields the changes in messages of at most `_MOST_HASHES` hashes, of which only the first may say `whole`."""
    tagged = [(hash, False) for hash in changes.removed] + [(hash, True) for hash in changes.stored]
    for start in range(0, max(1, len(tagged)), _MOST_HASHES):
        part = tagged[start : start + _MOST_HASHES]
        yield worker_pb2.CacheEvents(
            whole=changes.whole and start == 0,
            stored=pack_hashes(hash for hash, there in part if there),
            removed=pack_hashes(hash for hash, there in part if not there),
        )
