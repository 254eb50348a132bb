"""Tests a tier's index under random interleavings of writes, reads, losses and restarts: a slot is in one state, and
what the index says is what the slot was last given."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.kv.eviction import LeastRecentlyUsed
from services.kv.tier_index import TierIndex
from tests.support.examples import num_examples

HASHES = st.integers(0, 9).map(lambda number: bytes([number]) * 16)
PICKS = st.integers(0, 11)
NUM_SLOTS = 4


class Tier(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.told: set[bytes] = set()
        self.index = self.new_index()
        self.writing: list[int] = []
        self.content: dict[int, bytes] = {}
        """What each slot was last given."""

    def new_index(self) -> TierIndex:
        index = TierIndex(NUM_SLOTS, LeastRecentlyUsed())
        index.follow(self.told.add, self.told.remove)
        return index

    @rule()
    def take(self) -> None:
        slot = self.index.take()
        assert (slot is None) == (len(self.writing) == NUM_SLOTS)
        if slot is not None:
            assert slot not in self.writing
            self.writing.append(slot)
            self.content.pop(slot, None)

    @precondition(lambda self: self.writing)
    @rule(pick=PICKS, hash=HASHES)
    def put(self, pick: int, hash: bytes) -> None:
        slot = self.writing.pop(pick % len(self.writing))
        self.content[slot] = hash
        self.index.put(slot, hash)
        assert hash in self.index

    @precondition(lambda self: self.writing)
    @rule(pick=PICKS)
    def give_back(self, pick: int) -> None:
        self.index.give_back(self.writing.pop(pick % len(self.writing)))

    @rule(hash=HASHES)
    def find(self, hash: bytes) -> None:
        slot = self.index.find(hash)
        assert (slot is not None) == (hash in self.index)
        if slot is not None:
            assert self.content[slot] == hash
            assert self.index.is_in(slot, hash)

    @rule(slot=st.integers(0, NUM_SLOTS - 1), hash=HASHES)
    def drop(self, slot: int, hash: bytes) -> None:
        held = self.index.is_in(slot, hash)
        num_held = len(self.index)
        self.index.drop(slot, hash)
        assert len(self.index) == num_held - held

    @rule()
    def restart(self) -> None:
        """The process ends; whatever was in a slot is found again, but for what was being written."""
        self.told.clear()
        self.index = self.new_index()
        self.writing.clear()
        self.index.restore((slot, hash) for slot, hash in sorted(self.content.items()))
        assert set(self.index.held()) == set(self.content.values())

    @rule(hashes=st.lists(HASHES, max_size=4))
    def num_held(self, hashes: list[bytes]) -> None:
        num_held = self.index.num_held(hashes)
        assert all(hash in self.index for hash in hashes[:num_held])
        assert num_held == len(hashes) or hashes[num_held] not in self.index

    @invariant()
    def consistent(self) -> None:
        self.index.check()
        assert self.told == set(self.index.held()), "listeners know what is held"


TestTier = Tier.TestCase
TestTier.settings = settings(max_examples=num_examples(60), stateful_step_count=40, deadline=None)


def test_least_recently_used_is_evicted_first() -> None:
    index = TierIndex(2, LeastRecentlyUsed())
    for hash in (b"a", b"b"):
        slot = index.take()
        assert slot is not None
        index.put(slot, hash)
    index.find(b"a")
    assert index.take() is not None
    assert list(index.held()) == [b"a"]
