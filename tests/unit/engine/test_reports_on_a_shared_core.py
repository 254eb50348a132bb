"""Tests that reports of steps get their turn although steps compute without a pause."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from services.engine.config import EngineConfig, EngineInfo, StepReport
from services.engine.engine import Engine
from services.engine.loading import Loaded
from services.engine.model.kv_cache import KVCache, KVShape
from services.engine.schedule.sequence import StepPlan, StepResult
from tests.support.engine_driver import EngineDriver
from tests.support.fake_runner import FakeRunner

NUM_STEPS = 40
MUCH = bytes(4 << 20)


@pytest.fixture
def one_core() -> Iterator[None]:
    """Lets this thread, and those that it starts, run on one core only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


class Taker(EngineDriver):
    """Is a driver whose reports another thread takes up, as a worker's event loop does."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.reported, self.num_taken_up, self.over_all = threading.Event(), 0, False
        self.thread = threading.Thread(target=self._take_up)

    def _on_step(self, report: StepReport) -> None:
        super()._on_step(report)
        self.reported.set()

    def _take_up(self) -> None:
        while not self.over_all:
            assert self.reported.wait(10), "no step is reported"
            self.reported.clear()
            self.num_taken_up = len(self.reports)


class ComputingRunner(FakeRunner):
    """Computes for milliseconds without the interpreter's lock, and notes whether every report was taken up before."""

    def __init__(self) -> None:
        self.driver: Taker | None = None
        self.in_time: list[bool] = []

    def run(self, plan: StepPlan) -> StepResult:
        if self.driver is not None:
            self.in_time.append(self.driver.num_taken_up == len(self.driver.reports))
            hashlib.sha256(MUCH).digest()
        return super().run(plan)


def test_a_report_is_taken_up_before_the_next_step(one_core: None) -> None:
    runner = ComputingRunner()

    def loader(config: EngineConfig) -> Loaded:
        cache = KVCache(KVShape(1, 1, 4, 4, torch.float32), 16, torch.device("cpu"))
        info = EngineInfo("m", "d", "c", "n", "float32", 1, 1, 4, 4, 16, 64, 100, (2,), "cpu")
        return Loaded(info, cache, runner)

    driver = Taker(Engine(EngineConfig("", "m"), loader))
    with driver:
        runner.driver = driver
        driver.thread.start()
        driver.wait(driver.submit([1, 2, 3], NUM_STEPS))
        driver.over_all = True
        driver.reported.set()
        driver.thread.join()
    assert len(runner.in_time) == NUM_STEPS
    # On a busy machine another process may get the turn.
    assert sum(runner.in_time) > NUM_STEPS // 2, runner.in_time
