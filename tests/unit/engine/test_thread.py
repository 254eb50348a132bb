"""Tests the step thread, with a runner that does what the test says."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from services.core.errors import StepFailed
from services.engine import engine as engine_module
from services.engine.config import EngineConfig, EngineInfo
from services.engine.engine import Engine
from services.engine.loading import Loaded
from services.engine.model.kv_cache import KVCache, KVShape
from services.engine.schedule.sequence import Finish, Mode, StepPlan, StepResult
from services.kv.pool import Holder
from tests.support.blocks import set_aside
from tests.support.engine_driver import EngineDriver
from tests.support.fake_runner import FakeRunner
from tests.support.patience import HANG_S

MakeDriver = Callable[..., EngineDriver]
NUM_BLOCKS, BLOCK_SIZE = 8, 4


class ScriptedRunner(FakeRunner):
    """Is a runner of which, when it is `gated`, each step says that it began, and waits to be let go."""

    def __init__(self) -> None:
        self.gated = False
        self.began: queue.Queue[StepPlan] = queue.Queue()
        self.go = threading.Semaphore(0)
        self.error: Exception | None = None
        self.num_reclaims = 0
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if self.gated:
            self.began.put(plan)
            assert self.go.acquire(timeout=HANG_S)
        if self.error is not None:
            raise self.error
        return super().run(plan)

    def reclaim(self) -> None:
        self.num_reclaims += 1


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
def make_driver(runner: ScriptedRunner) -> Iterator[MakeDriver]:
    def loader(config: EngineConfig) -> Loaded:
        cache = KVCache(KVShape(1, 1, 4, BLOCK_SIZE, torch.float32), NUM_BLOCKS, torch.device("cpu"))
        info = EngineInfo("m", "d", "c", "n", "float32", 1, 1, 4, BLOCK_SIZE, NUM_BLOCKS, 64, 100, (2,), "cpu")
        return Loaded(info, cache, runner)

    def make(gated: bool = False) -> EngineDriver:
        config = EngineConfig(str(Path()), "m", max_num_seqs=4, max_num_batched_tokens=8)
        driver = EngineDriver(Engine(config, loader))
        runner.gated = gated  # the warm-up was not
        return driver

    yield make
    assert not any(thread.name == "engine-step" for thread in threading.enumerate())


def test_warm_up_measures_costs(make_driver: MakeDriver) -> None:
    with make_driver() as driver:
        stats = driver.engine.stats()
        assert stats.ms_per_decode_step > 0
        assert stats.num_steps == 0


def test_runs_to_the_end_and_goes_idle(make_driver: MakeDriver) -> None:
    with make_driver() as driver:
        first, second = driver.wait(driver.submit([1, 2, 3], 4), driver.submit([1], 2))
        assert (first.token_ids, first.finish) == ([7] * 4, Finish.LENGTH)
        assert second.token_ids == [7] * 2
        (stopped,) = driver.wait(driver.submit([5], 9, stop_token_ids=frozenset({7}), min_tokens=3))
        assert (len(stopped.tokens), stopped.finish) == (4, Finish.STOP)
        stats = driver.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.current_step_ms) == (0, 0, 0.0)
        assert stats.num_steps == max(report.step_number for report in driver.reports)


def test_admission_is_reported_before_the_step(runner: ScriptedRunner, make_driver: MakeDriver) -> None:
    with make_driver(gated=True) as driver:
        seq_id = driver.submit([1, 2, 3], 1)
        runner.began.get(timeout=HANG_S)
        assert driver.outputs[seq_id].block_ids
        assert driver.engine.stats().current_step_ms >= 0
        assert driver.engine.tally.num_steps == 0
        runner.go.release()
        driver.wait(seq_id)


def test_abort_in_a_step_waits_for_its_end(runner: ScriptedRunner, make_driver: MakeDriver) -> None:
    with make_driver(gated=True) as driver:
        aborted = driver.submit([1, 2, 3], 5)
        runner.began.get(timeout=HANG_S)
        driver.engine.abort(aborted)
        assert not driver.engine.stats().ledger.idle  # the step still writes there
        other = driver.submit([1], 1)
        runner.go.release()
        plan = runner.began.get(timeout=HANG_S)
        assert [part.seq_id for part in plan.sequences] == [other]
        runner.go.release()
        driver.wait(other)
        assert driver.outputs[aborted].tokens == []
        driver.engine.abort(aborted)  # unknown by now
    assert not driver.outputs[aborted].over.is_set()


def test_freed_blocks_wake_the_engine(make_driver: MakeDriver) -> None:
    with make_driver() as driver:
        taken = set_aside(driver.engine, NUM_BLOCKS)
        seq_id = driver.submit([1, 2], 2)
        driver.engine.release(taken, Holder.IMPORT)
        driver.wait(seq_id)


def test_prefill_only_keeps_its_lease(make_driver: MakeDriver) -> None:
    with make_driver() as driver:
        (output,) = driver.wait(driver.submit([1, 2, 3, 4, 5], 9, mode=Mode.PREFILL_ONLY))
        assert (output.token_ids, output.finish) == ([7], None)
        assert driver.engine.stats().ledger.leased == len(output.block_ids) == 2
        driver.engine.release(output.block_ids, Holder.LEASE)


def test_a_step_that_raises_ends_its_sequences_only(
    runner: ScriptedRunner, make_driver: MakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    with make_driver(gated=True) as driver:
        failed = driver.submit([1, 2, 3], 3)
        runner.began.get(timeout=HANG_S)
        later = driver.submit([1], 1)
        runner.error = RuntimeError("out of memory")
        runner.go.release()
        runner.began.get(timeout=HANG_S)  # the next step waits, so that nothing changes under the test
        (output,) = driver.wait(failed)
        assert isinstance(output.error, StepFailed)
        assert "out of memory" in str(output.error)
        assert (driver.engine.stats().consecutive_step_failures, runner.num_reclaims) == (1, 1)
        runner.error = None
        runner.go.release()
        (output,) = driver.wait(later)
        assert output.token_ids == [7]
        assert driver.engine.stats().consecutive_step_failures == 0
    assert "step 1 failed" in caplog.text


def test_stop_drops_what_runs(runner: ScriptedRunner, make_driver: MakeDriver) -> None:
    with make_driver(gated=True) as driver:
        driver.submit([1], 50)
        runner.began.get(timeout=HANG_S)
        driver.submit([1] * 30, 5)
        stopper = threading.Thread(target=driver.engine.stop)
        stopper.start()
        runner.gated = False
        runner.go.release()
        stopper.join(10)
        assert not stopper.is_alive()
        assert not driver.engine.alive
        driver.engine.check_idle()
        driver.stopped = True


def test_a_defect_ends_the_thread_loudly(make_driver: MakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    driver = make_driver()

    def broken(report: object) -> None:
        raise ValueError("not a step's fault")

    driver.engine.start(broken)
    driver.submit([1], 1)
    driver.engine._thread.join(10)  # type: ignore[union-attr]
    assert not driver.engine.alive
    assert "not a step's fault" in caplog.text
    driver.engine.stop()
    driver.engine.cache.close()


def test_memory_is_made_ready_only_while_there_is_nothing_to_run(
    runner: ScriptedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine asks when it has rested for a while, and again after steps, since these may have used blocks: right
    after a step, what it computed is handed over, and would wait."""
    monkeypatch.setattr(engine_module, "_AT_REST_S", 0.3)
    told: queue.Queue[int] = queue.Queue()
    more = iter((True, True, False))

    def touch(num_used: int) -> bool:
        told.put(num_used)
        return next(more, False)

    def loader(config: EngineConfig) -> Loaded:
        cache = KVCache(KVShape(1, 1, 4, BLOCK_SIZE, torch.float32), NUM_BLOCKS, torch.device("cpu"))
        info = EngineInfo("m", "d", "c", "n", "float32", 1, 1, 4, BLOCK_SIZE, NUM_BLOCKS, 64, 100, (2,), "cpu")
        return Loaded(info, cache, runner, touch=touch)

    config = EngineConfig(str(Path()), "m", max_num_seqs=4, max_num_batched_tokens=8)
    with EngineDriver(Engine(config, loader)) as driver:
        assert [told.get(timeout=HANG_S) for _ in range(3)] == [0, 0, 0]
        runner.gated = True
        seq_id = driver.submit([1] * (BLOCK_SIZE + 1), 1)
        runner.began.get(timeout=HANG_S)
        assert told.empty(), "a step runs"
        runner.gated = False
        runner.go.release()
        driver.wait(seq_id)
        ended_s = time.monotonic()
        assert told.get(timeout=HANG_S) == 2, "the sequence had two blocks"
        assert time.monotonic() - ended_s > 0.2
