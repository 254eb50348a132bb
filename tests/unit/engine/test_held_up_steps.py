"""Tests what the engine learns of a step by the time that its thread has run: one that was stopped, or that waited for
the processor, shows nothing of what steps cost, and the next is shorter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.core.clock import ManualClock
from services.engine.config import EngineConfig, EngineInfo
from services.engine.cost_model import CostModel
from services.engine.engine import Engine
from services.engine.model.kv_cache import KVCache, KVShape
from services.engine.schedule.sequence import StepPlan, StepResult
from services.engine.warm_up import Loaded
from tests.support.engine_driver import EngineDriver
from tests.support.fake_runner import FakeRunner
from tests.support.patience import HANG_S

NUM_BLOCKS, BLOCK_SIZE, STEP_TOKENS = 64, 16, 128
TOKEN_S = 0.01


class SlowRunner(FakeRunner):
    """Is a runner whose steps take a hundredth of a second a token, on clocks of its own."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.ran_s = 0.0
        """What the thread has used of the processor."""
        self.times_slower: list[float] = []
        """How many times as long the next steps take, of which the thread runs as long as ever."""
        self.sizes: list[int] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.sizes.append(plan.num_tokens)
        self.ran_s += plan.num_tokens * TOKEN_S
        self.clock.advance(plan.num_tokens * TOKEN_S * (self.times_slower.pop(0) if self.times_slower else 1.0))
        return super().run(plan)


@pytest.fixture
def runner() -> SlowRunner:
    return SlowRunner()


@pytest.fixture
def driver(runner: SlowRunner) -> Iterator[EngineDriver]:
    cache = KVCache(KVShape(1, 1, 4, BLOCK_SIZE, torch.float32), NUM_BLOCKS, torch.device("cpu"))
    info = EngineInfo("m", "d", "c", "n", "float32", 1, 1, 4, BLOCK_SIZE, NUM_BLOCKS, 1000, 100, (2,), "cpu")
    config = EngineConfig(str(Path()), "m", max_num_batched_tokens=STEP_TOKENS)
    engine = Engine(config, lambda _: Loaded(info, cache, runner), clock=runner.clock, processor_s=lambda: runner.ran_s)
    engine._costs = costs = CostModel()  # warming up measured real time
    for num_tokens in (16, STEP_TOKENS):
        costs.calibrate(num_tokens, 0, num_tokens * TOKEN_S * 1e3)
    runner.sizes.clear()
    with EngineDriver(engine) as driver:
        yield driver


def run(driver: EngineDriver, first: int, num_tokens: int) -> None:
    driver.wait(driver.submit([first] * num_tokens, 1), timeout_s=HANG_S)


def test_a_step_that_was_held_up_teaches_nothing(driver: EngineDriver, runner: SlowRunner) -> None:
    before = driver.engine.stats()
    runner.times_slower = [20.0]
    run(driver, 1, 100)
    after = driver.engine.stats()
    assert after.prefill_step.num_steps == before.prefill_step.num_steps
    assert after.ms_per_prefill_token == pytest.approx(before.ms_per_prefill_token)
    run(driver, 2, 100)
    assert driver.engine.stats().prefill_step.num_steps > before.prefill_step.num_steps


def test_a_step_that_was_held_up_makes_no_outlier_of_the_worker(driver: EngineDriver, runner: SlowRunner) -> None:
    """What it says of its steps, by which routers find who is slower than its peers, has no such step."""
    run(driver, 1, 100)
    before = driver.engine.stats().prefill_step
    assert before.num_steps
    runner.times_slower = [20.0]
    run(driver, 2, 100)
    assert driver.engine.stats().prefill_step == before
    run(driver, 3, 100)
    assert driver.engine.stats().prefill_step.num_steps > before.num_steps


def test_a_step_that_is_slow_does(driver: EngineDriver, runner: SlowRunner) -> None:
    """A host with twice as much to do as it can is as slow as that."""
    before = driver.engine.stats()
    runner.times_slower = [2.0]
    run(driver, 1, 100)
    assert driver.engine.stats().ms_per_prefill_token > 1.1 * before.ms_per_prefill_token


def test_the_step_after_one_that_was_held_up_is_shorter(driver: EngineDriver, runner: SlowRunner) -> None:
    """Each is to take five seconds at most, if it is held up as much as the one before."""
    runner.times_slower = [20.0, 20.0, 1.0]
    run(driver, 1, 500)
    first, second, third, fourth = runner.sizes[:4]
    assert first == STEP_TOKENS
    assert second == pytest.approx(25, abs=1)
    assert third == pytest.approx(25, abs=1)
    assert fourth == STEP_TOKENS
