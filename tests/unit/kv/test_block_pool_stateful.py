"""Tests the pool against a model that keeps nothing but the list of references held."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.core.hashing import BlockHash, block_hashes
from services.kv.pool import BlockClass, BlockPool, Holder, OutOfBlocks
from tests.support.examples import num_examples

CHAINS = [block_hashes([stem] * 5, 1) for stem in range(3)]


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.found: dict[BlockHash, int] = {}
        self.pool = BlockPool(
            num_blocks,
            1,
            on_index=lambda hash, block_id: self.found.update({hash: block_id}),
            on_evict=lambda hash, block_id: self.evicted(hash, block_id),
        )
        self.held: list[tuple[Holder, list[int]]] = []

    def evicted(self, hash: BlockHash, block_id: int) -> None:
        assert self.found.pop(hash) == block_id
        assert not any(block_id in block_ids for _, block_ids in self.held), "a held block was evicted"

    @rule(num_blocks=st.integers(0, 5), holder=st.sampled_from(Holder))
    def allocate(self, num_blocks: int, holder: Holder) -> None:
        before = self.pool.ledger()
        try:
            block_ids = self.pool.allocate(num_blocks, holder)
        except OutOfBlocks:
            assert num_blocks > before.free + before.cached
            assert self.pool.ledger() == before
            return
        assert len(set(block_ids)) == num_blocks
        for _, others in self.held:
            assert not set(others) & set(block_ids), "a held block was given away"
        assert not set(self.found.values()) & set(block_ids), "a fresh block is not findable"
        self.held.append((holder, block_ids))

    @rule(chain=st.sampled_from(CHAINS), holder=st.sampled_from(Holder))
    def share(self, chain: list[BlockHash], holder: Holder) -> None:
        block_ids = self.pool.match_prefix(chain)
        assert block_ids == [self.found[hash] for hash in chain[: len(block_ids)]]
        assert len(block_ids) == len(chain) or chain[len(block_ids)] not in self.found
        self.pool.acquire(block_ids, holder)
        self.held.append((holder, block_ids))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), holder=st.sampled_from(Holder))
    def also_held(self, data: st.DataObject, holder: Holder) -> None:
        _, block_ids = data.draw(st.sampled_from(self.held))
        self.pool.acquire(block_ids, holder)
        self.held.append((holder, list(block_ids)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.held) - 1))
        holder, block_ids = self.held.pop(at)
        self.pool.release(block_ids, holder)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), to=st.sampled_from(Holder))
    def transfer(self, data: st.DataObject, to: Holder) -> None:
        at = data.draw(st.integers(0, len(self.held) - 1))
        from_, block_ids = self.held[at]
        self.pool.transfer(block_ids, from_, to)
        self.held[at] = (to, block_ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), chain=st.sampled_from(CHAINS))
    def index(self, data: st.DataObject, chain: list[BlockHash]) -> None:
        _, block_ids = data.draw(st.sampled_from(self.held))
        taken = set(self.found.values())
        for block_id, hash in zip(block_ids, chain, strict=False):
            if block_id not in taken and self.pool.class_of(block_id) is not BlockClass.IMPORTING:
                known = hash in self.found
                self.pool.index(block_id, hash)
                assert known or self.found[hash] == block_id

    @rule(most=st.integers(0, 10), num_blocks=st.integers(0, 10))
    def copy(self, most: int, num_blocks: int) -> None:
        """Whoever copies blocks is given each once, and learns which were evicted meanwhile."""
        blocks = self.pool.take_uncopied(most)
        assert len(blocks) <= most
        assert all(self.found[block.hash] == block.block_id and self.pool.unchanged(block) for block in blocks)
        assert not {block.block_id for block in blocks} & {block.block_id for block in self.pool.take_uncopied(0)}
        if num_blocks <= self.pool.num_available:
            self.held.append((Holder.SEQUENCE, self.pool.allocate(num_blocks, Holder.SEQUENCE)))
            for block in blocks:
                assert self.pool.unchanged(block) == (block.hash in self.found)

    @invariant()
    def ledger_holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        for holder in Holder:
            expected = Counter(block_id for kind, block_ids in self.held if kind is holder for block_id in block_ids)
            assert self.pool.references(holder) == expected.total()
            for block_id in range(self.pool.num_blocks):
                assert self.pool.references(holder, block_id) == expected[block_id]
        ledger = self.pool.ledger()
        assert ledger.total == self.pool.num_blocks
        assert self.pool.num_available == ledger.free + ledger.cached

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for holder, block_ids in self.held:
            self.pool.release(block_ids, holder)
        self.held.clear()
        self.pool.check()
        assert self.pool.ledger().idle
        assert self.pool.ledger().cached == len(self.found)


BlockPoolMachine.TestCase.settings = settings(max_examples=num_examples(100), stateful_step_count=40)
TestBlockPool = BlockPoolMachine.TestCase
