"""Tests that routers are told of a block as long as the pool or a tier has it."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.kv.index_log import IndexLog
from services.kv.index_union import IndexUnion
from tests.support.examples import num_examples

HASHES = st.integers(0, 5).map(lambda number: bytes([number]) * 16)


class Union(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool: dict[bytes, None] = {}
        self.pool_log = IndexLog()
        self.tiers: list[set[bytes]] = [set(), set()]
        self.usable = [True, True]
        self.union = IndexUnion(lambda number: self.pool_log.since(number, lambda: reversed(self.pool)))
        self.told: int | None = None
        self.known: set[bytes] = set()

    @rule(hash=HASHES)
    def pool_changes(self, hash: bytes) -> None:
        if hash in self.pool:
            del self.pool[hash]
            self.pool_log.remove(hash, 0)
        else:
            self.pool[hash] = None
            self.pool_log.store(hash, 0)

    @rule(hash=HASHES, number=st.integers(0, 1))
    def tier_changes(self, hash: bytes, number: int) -> None:
        tier = self.tiers[number]
        if hash in tier:
            tier.remove(hash)
            self.union.remove(hash, number)
        else:
            tier.add(hash)
            self.union.store(hash, number)

    @rule(number=st.integers(0, 1))
    def tier_is_left_out_or_back(self, number: int) -> None:
        self.usable[number] = not self.usable[number]
        self.union.count_tiers(self.usable)

    @precondition(lambda self: self.pool_log.number > 0)
    @rule()
    def pool_starts_over(self) -> None:
        """The union is too far behind, and is told the whole index."""
        self.union._told = None

    @rule()
    def follower_starts_over(self) -> None:
        self.told = None

    @rule()
    def tell(self) -> None:
        changes = self.union.since(self.told)
        if changes is not None:
            self.told = changes.number
            self.known = (set() if changes.whole else self.known - set(changes.removed)) | set(changes.stored)
        usable = [tier for tier, is_usable in zip(self.tiers, self.usable, strict=True) if is_usable]
        there = set(self.pool).union(*usable)
        assert self.known == there
        assert {hash for hash in self.known.union(*self.tiers) if self.union.has(hash)} == there

    @invariant()
    def bounded(self) -> None:
        assert len(self.union._places) <= 6


TestUnion = Union.TestCase
TestUnion.settings = settings(max_examples=num_examples(60), stateful_step_count=40, deadline=None)


def test_what_left_the_pool_and_no_tier_has_is_counted() -> None:
    log, pool = IndexLog(), {b"a": None, b"b": None}
    union = IndexUnion(lambda number: log.since(number, lambda: reversed(pool)))
    for hash in pool:
        log.store(hash, 0)
    union.follow()
    union.store(b"a", 0)
    for hash in (b"a", b"b"):
        log.remove(hash, 0)
    union.follow()
    assert union.num_lost == 1
    assert union.has(b"a")
    assert not union.has(b"b")


def test_of_much_what_the_pool_has_and_the_newest_are_told() -> None:
    log, pool = IndexLog(), {b"shared": None, b"new": None}
    union = IndexUnion(lambda number: log.since(number, lambda: reversed(pool)))
    for hash in (b"shared", b"older", b"old"):
        union.store(hash, 0)
    for hash in pool:
        log.store(hash, 0)
    whole = union.since(None)
    assert whole is not None
    assert whole.stored == (b"older", b"old", b"shared", b"new")
