"""Tests the import table: states, and the rule of reuse."""

from __future__ import annotations

import pytest

from services.core.errors import Cancelled
from services.kv.imports import Import, ImportState, ImportTable

S = ImportState


class Destination:
    def __init__(self) -> None:
        self.freed: list[Import] = []
        self.table = ImportTable(on_freed=self.freed.append)
        self.import_ = self.table.reserve((1, 2), 0.0)

    def reach(self, state: ImportState) -> None:
        steps = [self.table.begin, self.table.validate, self.table.ready]
        for step in steps[: [S.RESERVED, S.COPYING, S.VALIDATING, S.READY].index(state)]:
            step(self.import_, 0.0)
        assert self.import_.state is state


@pytest.fixture
def destination() -> Destination:
    return Destination()


def test_ready_passes_the_references_on(destination: Destination) -> None:
    destination.reach(S.READY)
    assert len(destination.table) == 0
    assert not destination.table.drain(destination.import_, 1.0)
    assert destination.freed == []


@pytest.mark.parametrize("state", [S.RESERVED, S.COPYING, S.VALIDATING])
def test_drain_frees_at_once_when_nothing_writes(destination: Destination, state: S) -> None:
    destination.reach(state)
    assert destination.table.drain(destination.import_, 1.0)
    assert destination.import_.state is S.FREED
    assert destination.freed == [destination.import_]
    assert len(destination.table) == 0
    assert not destination.table.drain(destination.import_, 1.0)
    assert destination.freed == [destination.import_]


def test_drain_waits_for_every_copy(destination: Destination) -> None:
    table, import_ = destination.table, destination.import_
    destination.reach(S.COPYING)
    table.copy_started(import_)
    table.copy_started(import_)
    table.drain(import_, 1.0)
    assert import_.state is S.DRAINING
    table.copy_ended(import_, 2.0)
    assert destination.freed == []
    assert len(table) == 1
    table.copy_ended(import_, 3.0)
    assert destination.freed == [import_]
    assert import_.entered_s[S.FREED] == 3.0
    with pytest.raises(AssertionError):
        table.copy_ended(import_, 4.0)


@pytest.mark.parametrize("quiet", [True, False])
def test_whoever_works_on_a_given_up_import_is_stopped(destination: Destination, quiet: bool) -> None:
    table, import_ = destination.table, destination.import_
    destination.reach(S.COPYING)
    if not quiet:
        table.copy_started(import_)
    table.drain(import_, 1.0)
    for step in (table.begin, table.validate, table.ready):
        with pytest.raises(Cancelled):
            step(import_, 2.0)
    with pytest.raises(Cancelled):
        table.copy_started(import_)
    if not quiet:
        table.copy_ended(import_, 3.0)
    assert destination.freed == [import_]


def test_no_copy_outside_copying_and_no_validation_under_one(destination: Destination) -> None:
    table, import_ = destination.table, destination.import_
    with pytest.raises(AssertionError):
        table.copy_started(import_)
    table.begin(import_, 0.0)
    table.copy_started(import_)
    with pytest.raises(AssertionError):
        table.validate(import_, 0.0)
