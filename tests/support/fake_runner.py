"""Provides runners for tests: one that computes nothing, and one that stands before the device of a running worker.

A test's own runner is one of these that says differently what a step does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from services.engine.engine import Engine
from services.engine.schedule.sequence import SampledToken, StepPlan, StepResult

if TYPE_CHECKING:
    from services.engine.warm_up import Runner
    from services.worker.host import WorkerHost

TOKEN = 7


class FakeRunner:
    """Samples `TOKEN` wherever a token is asked for."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(
            {part.seq_id: (SampledToken(TOKEN),) * len(part.rows) for part in plan.sequences if part.rows}
        )

    def reclaim(self) -> None:
        """Nothing is kept."""

    def tune(self, decode: Callable[[], float]) -> None:
        """There is nothing to choose."""

    def device_memory(self) -> dict[str, int]:
        return {}


def engine_of(host: WorkerHost) -> Engine:
    """Returns the torch engine of a running worker, for a test that damages it; workers see its `WorkerEngine`."""
    assert isinstance(host.engine, Engine)
    return host.engine


class RunnerInFront:
    """Takes the place of a running worker's runner, and lets that one do everything."""

    def __init__(self, host: WorkerHost) -> None:
        engine = engine_of(host)
        self._runner: Runner = engine._runner
        engine._runner = self

    def run(self, plan: StepPlan) -> StepResult:
        return self._runner.run(plan)

    def reclaim(self) -> None:
        self._runner.reclaim()

    def tune(self, decode: Callable[[], float]) -> None:
        self._runner.tune(decode)

    def device_memory(self) -> dict[str, int]:
        return self._runner.device_memory()
