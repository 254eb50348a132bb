"""Tests what a worker measures before it serves: enough to be placed by, and never for long,
however slow its CPU is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from services.core.start_progress import StartProgress, TellProgress, tell_nobody
from services.engine import warm_up as warming
from services.engine.config import EngineConfig, EngineInfo
from services.engine.cost_model import CostModel
from services.engine.model.kv_cache import KVCache, KVShape
from services.engine.schedule.sequence import StepPlan, StepResult
from services.engine.warm_up import Loaded, warm_up
from tests.support.fake_runner import FakeRunner

NUM_BLOCKS, BLOCK_SIZE = 128, 16
DECODE_S = 0.05


class SlowDevice(FakeRunner):
    """Is a runner whose steps take as long as it says, on a clock of its own."""

    def __init__(self, s_per_token: float) -> None:
        self.now_s = 0.0
        self.prefill_s = 0.0
        self.steps: list[int] = []
        self._s_per_token = s_per_token

    def perf_counter(self) -> float:
        return self.now_s

    def run(self, plan: StepPlan) -> StepResult:
        prefill_s = plan.num_tokens * self._s_per_token if plan.num_tokens > plan.num_decodes else 0.0
        self.prefill_s += prefill_s
        self.now_s += prefill_s or DECODE_S
        self.steps.append(plan.num_tokens)
        return super().run(plan)


def warmed_up(
    device: SlowDevice,
    monkeypatch: pytest.MonkeyPatch,
    num_batched_tokens: int = 512,
    tell: TellProgress = tell_nobody,
) -> CostModel:
    cache = KVCache(KVShape(1, 1, 4, BLOCK_SIZE, torch.float32), NUM_BLOCKS, torch.device("cpu"))
    info = EngineInfo("m", "d", "c", "n", "float32", 1, 1, 4, BLOCK_SIZE, NUM_BLOCKS, 2048, 100, (2,), "cpu")
    costs = CostModel()
    monkeypatch.setattr(warming, "time", SimpleNamespace(perf_counter=device.perf_counter))
    try:
        config = EngineConfig("", "m", max_num_batched_tokens=num_batched_tokens)
        warm_up(Loaded(info, cache, device), config, costs, tell)
    finally:
        cache.close()
    return costs


@pytest.mark.parametrize("ms_per_token", [0.1, 1.0, 3.0, 15.0, 46.0, 400.0])
def test_a_slow_device_is_not_asked_for_long(ms_per_token: float, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SlowDevice(ms_per_token / 1e3)
    costs = warmed_up(device, monkeypatch)
    assert device.prefill_s <= max(5.0, 16 * ms_per_token / 1e3)
    assert costs.at(0.0).ms_per_prefill_token == pytest.approx(ms_per_token)
    assert costs.at(0.0).ms_per_decode_step == pytest.approx(DECODE_S * 1e3)


def test_a_fast_device_runs_a_whole_step_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of each size is slow: it is the second that counts."""
    device = SlowDevice(0.0002)
    warmed_up(device, monkeypatch)
    assert device.steps.count(512) == 2


@pytest.mark.parametrize("num_batched_tokens", [1, 15, 16, 17, 100])
def test_small_steps(num_batched_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SlowDevice(0.0002)
    warmed_up(device, monkeypatch, num_batched_tokens)
    assert max(device.steps) <= max(num_batched_tokens, 8)
    assert num_batched_tokens in device.steps


@pytest.mark.parametrize(("s_per_token", "num_batched_tokens"), [(0.0002, 512), (0.4, 512), (0.0002, 1)])
def test_each_step_is_told_before_it_runs(
    s_per_token: float, num_batched_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SlowDevice(s_per_token)
    told: list[tuple[int, StartProgress]] = []
    warmed_up(device, monkeypatch, num_batched_tokens, lambda progress: told.append((len(device.steps), progress)))
    assert told[0] == (
        0,
        StartProgress("warm-up", f"prefill of {min(16, num_batched_tokens)} tokens", 0, told[0][1].total),
    )
    done = [progress.done for _, progress in told]
    assert done == sorted(done)
    (total,) = {progress.total for _, progress in told}
    assert done[-1] == total - 1
    assert told[-1][0] == len(device.steps) - 2, "and nothing runs after the last but what it tells"
