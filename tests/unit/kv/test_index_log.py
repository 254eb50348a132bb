"""Tests that whoever follows a prefix index by its log knows what is in it."""

from __future__ import annotations

import random

import pytest

from services.core.hashing import BlockHash
from services.kv.index_log import IndexLog
from services.kv.pool import BlockPool, Holder


def hash_of(number: int) -> BlockHash:
    return number.to_bytes(16, "big")


class Follower:
    """Keeps a set as the changes say, however seldom it asks."""

    def __init__(self, log: IndexLog, pool: BlockPool) -> None:
        self._log, self._pool = log, pool
        self._number: int | None = None
        self.hashes: set[BlockHash] = set()
        self.num_wholes = 0

    def follow(self) -> None:
        changes = self._log.since(self._number, self._pool.indexed)
        if changes is None:
            return
        assert not set(changes.stored) & set(changes.removed)
        if changes.whole:
            self.hashes = set()
            self.num_wholes += 1
        self.hashes -= set(changes.removed)
        self.hashes |= set(changes.stored)
        self._number = changes.number


@pytest.mark.parametrize("kept", [8, 64])
def test_a_follower_knows_the_index(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    monkeypatch.setattr("services.kv.index_log._MOST_CHANGES", kept)
    random_, log = random.Random(kept), IndexLog()
    pool = BlockPool(8, 1, on_index=log.store, on_evict=log.remove)
    often, seldom = Follower(log, pool), Follower(log, pool)
    for turn in range(300):
        block_ids = pool.allocate(random_.randint(1, 3), Holder.SEQUENCE)
        for block_id in block_ids:
            pool.index(block_id, hash_of(random_.randint(0, 20)))
        pool.release(block_ids, Holder.SEQUENCE)
        often.follow()
        assert often.hashes == set(pool.indexed())
        if turn % 10 == 9:
            seldom.follow()
            assert seldom.hashes == set(pool.indexed())
    assert often.num_wholes == 1
    assert (seldom.num_wholes > 1) is (kept == 8), "what is no longer kept is told as a whole"


def test_a_follower_is_told_nothing_twice() -> None:
    log = IndexLog()
    log.store(hash_of(1), 0)
    first = log.since(None, lambda: [hash_of(1)])
    assert first is not None
    assert first.whole
    assert log.since(first.number, list) is None
    log.store(hash_of(2), 1)
    log.remove(hash_of(2), 1)
    then = log.since(first.number, list)
    assert then is not None
    assert (then.whole, then.stored, then.removed) == (False, (), (hash_of(2),))


def test_of_a_huge_index_the_newest_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kv.index_log.MOST_INDEXED", 3)
    log = IndexLog()
    pool = BlockPool(8, 1, on_index=log.store, on_evict=log.remove)
    for number, block_id in enumerate(pool.allocate(8, Holder.SEQUENCE)):
        pool.index(block_id, hash_of(number))
    told = log.since(None, pool.indexed)
    assert told is not None
    assert told.stored == (hash_of(5), hash_of(6), hash_of(7))
