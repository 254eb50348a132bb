"""Tests what a router is sent of a worker's prefix cache."""

from __future__ import annotations

import pytest

from services.core.hashing import pack_hashes, short_hashes, unpack_hashes
from services.kv.index_log import IndexChanges
from services.worker.session import CacheFollower


def hashes(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(8, "little") + bytes(8) for number in numbers)


class Engine:
    """Answers each question with the next of some changes."""

    def __init__(self, *changes: IndexChanges) -> None:
        self._changes = list(changes)
        self.asked: list[int | None] = []

    def index_changes(self, after: int | None) -> IndexChanges | None:
        self.asked.append(after)
        return self._changes.pop(0) if self._changes else None


def test_changes_are_numbered_and_asked_for_from_the_last_one() -> None:
    engine = Engine(IndexChanges(7, True, hashes(1, 2), ()), IndexChanges(9, False, hashes(3), hashes(1)))
    follower = CacheFollower(engine.index_changes)
    first, second = follower.take(), follower.take()
    assert first is not None
    assert second is not None
    assert (first.number, first.whole, unpack_hashes(first.stored), first.removed) == (1, True, (1, 2), b"")
    assert (second.number, second.whole) == (2, False)
    assert (unpack_hashes(second.stored), unpack_hashes(second.removed)) == ((3,), (1,))
    assert follower.take() is None
    assert engine.asked == [None, 7, 9]


def test_an_empty_cache_is_told_as_a_whole_one() -> None:
    told = CacheFollower(Engine(IndexChanges(0, True, (), ())).index_changes).take()
    assert told is not None
    assert (told.number, told.whole, told.stored) == (1, True, b"")


def test_many_changes_go_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.session._MOST_HASHES", 3)
    engine = Engine(
        IndexChanges(7, True, hashes(*range(7)), ()), IndexChanges(9, False, hashes(10, 11), hashes(0, 1, 2, 3))
    )
    follower = CacheFollower(engine.index_changes)
    told = []
    while (events := follower.take()) is not None:
        told.append(events)
        assert follower.has_more is (len(told) in (1, 2, 4))
    assert [events.number for events in told] == [1, 2, 3, 4, 5]
    assert [events.whole for events in told] == [True, False, False, False, False]
    known: set[int] = set()
    for events in told:
        assert len(events.stored) + len(events.removed) <= 3 * 8
        known -= set(unpack_hashes(events.removed))
        known |= set(unpack_hashes(events.stored))
    assert known == {4, 5, 6, 10, 11}


def test_hashes_travel_as_the_first_half_of_them() -> None:
    full = [bytes(range(number, number + 16)) for number in range(3)]
    assert unpack_hashes(pack_hashes(full)) == short_hashes(full)
    assert len(set(short_hashes(full))) == 3
    with pytest.raises(ValueError, match="9 bytes"):
        unpack_hashes(bytes(9))
