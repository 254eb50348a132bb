"""Tests what crosses between simulated workers and the router: what is said at one moment is one message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.router.coordinator import Coordinator
from services.router.policy import Load
from services.sim.cluster import MESSAGE_S, SimPlan, _Simulation
from services.sim.profile import WorkerProfile

PLAN = SimPlan(0, 0, 1, profile=WorkerProfile("test", 0.1, 10.0, 1.0))


class Said:
    """Keeps what the router is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads: list[Load] = []
        self.cache: set[bytes] = set()
        monkeypatch.setattr(Coordinator, "worker_events", lambda _, __, ___, events, load, now: self.loads.append(load))
        monkeypatch.setattr(Coordinator, "cache_changed", self._changed)

    def _changed(self, *_: Any, stored: list[bytes], removed: list[bytes], **__: Any) -> None:
        assert not set(stored) & set(removed)
        self.cache = (self.cache | set(stored)) - set(removed)


def test_the_newest_of_a_moment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says twice within a moment what the load is and whether two blocks are cached, which changes between."""
    simulation = _Simulation(PLAN, [], lambda done: None, lambda served: None)
    said = Said(monkeypatch)
    worker = simulation._workers["mixed-0"]
    first, second = b"1" * 8, b"2" * 8
    for number, changes in ((1, {first: True, second: False}), (2, {first: False, second: True})):
        worker._pool.changes = dict(changes)
        simulation._tell(worker, [], replace(worker.load(), num_running=number))
    while simulation._world.step():
        pass
    assert [load.num_running for load in said.loads] == [2]
    assert said.cache == {second}
    assert simulation._world.now == MESSAGE_S


def test_two_moments_are_two_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = _Simulation(PLAN, [], lambda done: None, lambda served: None)
    said = Said(monkeypatch)
    worker = simulation._workers["mixed-0"]
    for number in (1, 2):
        simulation._tell(worker, [], replace(worker.load(), num_running=number))
        simulation._world.now += MESSAGE_S / 4
    while simulation._world.step():
        pass
    assert [load.num_running for load in said.loads] == [1, 2]
