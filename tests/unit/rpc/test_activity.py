"""Tests the periodic line: rates over the time they were taken in, silence while nothing happens, no harm when it
fails."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from services.core.config import load
from services.kv.pool import Ledger
from services.router import activity as of_router
from services.router.config import RouterConfig
from services.router.coordinator.workers import WorkerState
from services.router.policy.health import Health
from services.rpc.activity_log import ActivityLog
from services.worker import activity as of_worker
from services.worker.activity import WorkerFigures
from services.worker.config import WorkerConfig
from tests.support.patience import HANG_S

IDLE = WorkerFigures(0, 0, 0, 0, 0, 0, 0.0)
BUSY = WorkerFigures(5120, 200, 640, 160, 7, 2, 0.256)


class Clock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def now(self) -> float:
        return self.time_s


class Said:
    """Keeps an activity log over figures that the test sets, and its lines."""

    def __init__(self) -> None:
        self.clock, self.figures = Clock(), IDLE
        self.lines: list[tuple[WorkerFigures, WorkerFigures, float]] = []
        self.log = ActivityLog(lambda: self.figures, lambda *line: self.lines.append(line), self.clock, 10.0)

    def after(self, seconds: float) -> int:
        """Looks then; how many lines there are."""
        self.clock.time_s += seconds
        self.log.look()
        return len(self.lines)


def test_one_line_a_look_while_anything_changes_and_one_at_rest() -> None:
    said = Said()
    assert [said.after(10), said.after(10)] == [0, 0], "nothing happened yet"
    said.figures = BUSY
    assert said.after(20) == 1
    assert said.lines[0] == (IDLE, BUSY, 20.0)
    assert said.after(10) == 2
    assert said.lines[1] == (BUSY, BUSY, 10.0)
    assert [said.after(10), said.after(10)] == [2, 2]
    said.figures = IDLE
    assert said.after(10) == 3
    assert said.lines[2] == (BUSY, IDLE, 10.0), "the silence before is no part of the rates"


def test_a_clock_that_stands_still_divides_nothing_by_zero() -> None:
    said = Said()
    said.figures = BUSY
    assert said.after(0) == 0


async def test_it_goes_on_after_a_line_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    class Running(Clock):
        def now(self) -> float:
            self.time_s += 1
            return self.time_s

    clock, told = Running(), asyncio.Event()
    figures = iter(range(1000))

    def say(before: int, now: int, seconds: float) -> None:
        if now < 3:
            raise ValueError("no such figure")
        told.set()

    def read() -> int:
        return next(figures)

    task = asyncio.create_task(ActivityLog(read, say, clock, 0.001).run())
    async with asyncio.timeout(HANG_S):
        await told.wait()
    task.cancel()
    assert [record.getMessage() for record in caplog.records] == ["the line about this process's activity failed"] * 2
    assert "no such figure" in caplog.text


def test_what_a_worker_tells(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    of_worker.say(IDLE, BUSY, 10.0)
    of_worker.say(BUSY, BUSY, 9.97)
    assert [record.getMessage() for record in caplog.records] == [
        "last 10 s: 512.0 prefill tokens/s, 20.0 output tokens/s, 7 running, 2 waiting, KV 25.6%, prefix hits 25%",
        "last 10 s: 0.0 prefill tokens/s, 0.0 output tokens/s, 7 running, 2 waiting, KV 25.6%, prefix hits -",
    ]
    assert all(record.args for record in caplog.records)


def test_a_worker_reads_its_engine() -> None:
    stats = SimpleNamespace(
        ledger=Ledger(importing=1, leased=2, active=3, cached=50, free=44),
        prefix_tokens_queried=640,
        prefix_tokens_hit=160,
        num_running=7,
        num_waiting=2,
    )
    tally = SimpleNamespace(prefill_tokens=5120, sampled_tokens=200)
    engine: Any = SimpleNamespace(stats=lambda: stats, tally=tally)
    assert of_worker.read(engine) == WorkerFigures(5120, 200, 640, 160, 7, 2, 0.06)


def test_what_a_router_tells(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = of_router.RouterFigures(10, 8, 500, 0, 2, 2, 2)
    of_router.say(before, of_router.RouterFigures(15, 12, 1000, 1, 3, 2, 3), 10.0)
    assert caplog.records[0].getMessage() == (
        "last 10 s: 0.50 requests/s accepted, 0.40 ended, 50.0 output tokens/s, 1 queued, 3 running, "
        "2 of 3 workers ready"
    )


def test_a_router_counts_those_as_ready_of_which_its_status_says_so() -> None:
    def worker(health: Health, ejection: object = None) -> object:
        return SimpleNamespace(
            state=WorkerState.READY, is_gone=False, health=SimpleNamespace(state=health), ejection=ejection
        )

    workers = [worker(Health.UP), worker(Health.DOWN), worker(Health.NEW), worker(Health.UP, ejection="slow")]
    conductor = SimpleNamespace(coordinator=SimpleNamespace(workers=SimpleNamespace(all=lambda: workers)))
    catalogue: Any = SimpleNamespace(all=lambda: [SimpleNamespace(conductor=conductor)], phases=Counter)
    requests: Any = SimpleNamespace(num_accepted=0, num_ended=0, num_output_tokens=0)
    figures = of_router.read(catalogue, requests)
    assert (figures.workers_ready, figures.workers) == (1, 4)


@pytest.mark.parametrize("kind", [RouterConfig, WorkerConfig])
def test_the_interval_is_a_setting_of_every_service(kind: type[Any]) -> None:
    arguments: Any = SimpleNamespace()
    assert load(kind, arguments, {}).log_interval_s == 10.0
    assert load(kind, arguments, {"BATON_LOG_INTERVAL_S": "0"}).log_interval_s == 0.0
