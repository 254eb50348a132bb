"""Tests what must happen in which order on a device that computes beside us, tried with a CPU in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.engine.config import EngineConfig, EngineInfo
from services.engine.engine import Engine
from services.engine.model.kv_cache import KVCache, KVShape
from services.engine.runner import DeviceRunner
from services.engine.schedule.sequence import Sequence, StoppingParams
from services.engine.warm_up import Loaded
from tests.support.engine_driver import GREEDY, EngineDriver

NUM_BLOCKS, BLOCK_SIZE = 8, 4
SHAPE = KVShape(1, 1, 4, BLOCK_SIZE, torch.float32)


class _Model:
    """Its weights are random, and it fails when it is told to."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def forward(self, inputs: Any, cache: KVCache) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return torch.zeros(len(inputs.logit_rows), 100)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the calls in order; what a GPU would do is only noted."""
    noted: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: noted.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: noted.append("empty cache"))
    return noted


class _Driver:
    def __init__(self, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = _Model()
        self.cache = KVCache(SHAPE, NUM_BLOCKS, torch.device("cpu"))
        info = EngineInfo("m", "d", "c", "n", "float32", 1, 1, 4, BLOCK_SIZE, NUM_BLOCKS, 32, 100, (2,), "cpu")
        runner = DeviceRunner(self.model, self.cache)  # type: ignore[arg-type]
        self.engine = Engine(EngineConfig("", "m"), lambda _: Loaded(info, self.cache, runner))
        self.cache.device = torch.device("cuda")
        free = self.engine._pool.release

        def release(*arguments: Any) -> None:
            calls.append("free blocks")
            free(*arguments)

        monkeypatch.setattr(self.engine._pool, "release", release)


def test_after_a_failed_step_the_device_is_done_before_blocks_are_free(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that failed may still write into them, and their next owner would read it."""
    made = _Driver(calls, monkeypatch)
    made.model.error = RuntimeError("out of memory")
    with EngineDriver(made.engine) as driver:
        (output,) = driver.wait(driver.submit([1, 2, 3], 4))
    assert output.error is not None
    assert calls[:3] == ["synchronize", "empty cache", "free blocks"]


def test_a_device_that_is_lost_ends_the_step_thread(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is free again, since nobody can tell any more what writes where; the supervisor
    starts another worker."""
    made = _Driver(calls, monkeypatch)
    made.model.error = RuntimeError("an illegal memory access was encountered")

    def lost(device: object = None) -> None:
        raise made.model.error or AssertionError("only after a failure")

    monkeypatch.setattr(torch.accelerator, "synchronize", lost)
    made.engine.start(lambda report: None)
    made.engine.add(Sequence(1, [1, 2, 3], 3, GREEDY, StoppingParams(max_tokens=4), 0.0))
    made.engine.join()
    assert not made.engine.alive
    made.engine.stop()
    assert "free blocks" not in calls
    made.cache.close()
