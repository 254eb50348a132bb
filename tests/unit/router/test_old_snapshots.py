"""Tests that a snapshot is judged by its number, and not by when it arrives."""

from __future__ import annotations

from dataclasses import replace

from services.router.policy import Role
from tests.support.router_bench import Bench


def test_an_older_snapshot_changes_nothing() -> None:
    bench = Bench()
    bench.join("d", Role.DECODE)
    bench.load("d", blocks_free=0, blocks_active=64, num_running=8)
    newest = bench.loads["d"]
    for number in (newest.sequence_number, newest.sequence_number - 1):
        old = replace(newest, sequence_number=number, blocks_free=64, blocks_active=0, num_running=0)
        bench.coordinator.worker_events("d", 1, (), old, bench.now)
        assert bench.coordinator.workers.get("d").load == newest
