"""Provides a device whose steps stay where a test wants them until it lets them go. All else is the real one's."""

from __future__ import annotations

import threading
from collections.abc import Callable

from services.engine.schedule.sequence import StepPlan, StepResult
from services.worker.host import WorkerHost
from tests.support.fake_runner import RunnerInFront

_LONGEST_S = 60.0
"""A test that forgets to release a step fails here instead of hanging the suite."""


class HeldRunner(RunnerInFront):
    """Holds the first step for which `hold` is true."""

    def __init__(self, host: WorkerHost, hold: Callable[[StepPlan], bool] = lambda plan: False) -> None:
        self.hold = hold
        self.is_holding = threading.Event()
        self.num_steps = 0
        """That have begun."""
        self._released = threading.Event()
        super().__init__(host)

    def run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        if not self._released.is_set() and self.hold(plan):
            self.is_holding.set()
            assert self._released.wait(_LONGEST_S), "nobody released the step"
        return super().run(plan)

    def release(self) -> None:
        self._released.set()
