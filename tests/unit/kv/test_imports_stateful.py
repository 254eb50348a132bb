"""The import table under random interleavings of fetches, copies and cancellations."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from services.core.clock import ManualClock
from services.core.errors import Cancelled
from services.kv.imports import Import, ImportState, ImportTable
from tests.support.examples import num_examples


class ImportMachine(RuleBasedStateMachine):
    """Blocks come from a pool of the test's own, so that a second owner of a block is noticed."""

    imports = Bundle("imports")

    @initialize()
    def begin(self) -> None:
        self.clock = ManualClock()
        self.all: list[Import] = []
        self.num_freed: Counter[Import] = Counter()
        self.writing: Counter[int] = Counter()
        self.free = set(range(64))
        self.table = ImportTable(on_freed=self.on_freed)

    def on_freed(self, import_: Import) -> None:
        self.num_freed[import_] += 1
        assert not any(self.writing[block_id] for block_id in import_.block_ids), "freed under a write"
        assert self.free.isdisjoint(import_.block_ids)
        self.free.update(import_.block_ids)

    @rule(target=imports, num_blocks=st.integers(0, 4))
    def reserve(self, num_blocks: int) -> Import:
        block_ids = [self.free.pop() for _ in range(min(num_blocks, len(self.free)))]
        import_ = self.table.reserve(block_ids, self.clock.advance(1))
        self.all.append(import_)
        return import_

    @rule(import_=imports)
    def step(self, import_: Import) -> None:
        """The fetch goes one state on, if it may."""
        steps = {
            ImportState.RESERVED: self.table.begin,
            ImportState.COPYING: self.table.validate,
            ImportState.VALIDATING: self.table.ready,
            ImportState.DRAINING: self.table.ready,
            ImportState.FREED: self.table.validate,
        }
        act = steps.get(import_.state)
        if act is None or (act == self.table.validate and import_.num_copies and not import_.given_up):
            return
        if import_.given_up:
            with pytest.raises(Cancelled):
                act(import_, self.clock.now())
        else:
            act(import_, self.clock.advance(1))

    @rule(import_=imports)
    def start_copy(self, import_: Import) -> None:
        if import_.state is ImportState.COPYING:
            self.table.copy_started(import_)
            self.writing.update(import_.block_ids)

    @rule(import_=imports)
    def end_copy(self, import_: Import) -> None:
        if import_.num_copies:
            self.writing.subtract(import_.block_ids)
            self.table.copy_ended(import_, self.clock.advance(1))

    @rule(import_=imports)
    def drain(self, import_: Import) -> None:
        may = not import_.given_up and import_.state is not ImportState.READY
        assert self.table.drain(import_, self.clock.advance(1)) == may

    @invariant()
    def freed_exactly_once(self) -> None:
        for import_ in self.all:
            assert self.num_freed[import_] == (import_.state is ImportState.FREED)
            assert import_.state is not ImportState.DRAINING or import_.num_copies > 0
        over = (ImportState.READY, ImportState.FREED)
        assert set(self.table) == {import_ for import_ in self.all if import_.state not in over}

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        for import_ in self.all:
            self.table.drain(import_, self.clock.now())
            while import_.num_copies:
                self.end_copy(import_)
        assert len(self.table) == 0
        self.freed_exactly_once()
        kept = [b for import_ in self.all if import_.state is ImportState.READY for b in import_.block_ids]
        assert sorted(kept) == sorted(set(range(64)) - self.free)


ImportMachine.TestCase.settings = settings(max_examples=num_examples(100), stateful_step_count=40)
TestImports = ImportMachine.TestCase
