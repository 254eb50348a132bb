"""Provides a device whose steps raise when a test says so. Everything else is the real one's."""

from __future__ import annotations

from collections.abc import Callable

from services.engine.schedule.sequence import StepPlan, StepResult
from services.worker.host import WorkerHost
from tests.support.fake_runner import RunnerInFront

Fault = Callable[[StepPlan], Exception | None]


def always(error: Exception) -> Fault:
    return lambda plan: error


def beyond(num_tokens: int, error: Exception) -> Fault:
    """Steps with a sequence that would be longer than `num_tokens`."""
    return lambda plan: error if any(part.start + part.num_tokens > num_tokens for part in plan.sequences) else None


class FaultyRunner(RunnerInFront):
    """Raises what `fault` says of a step, before the device sees it."""

    def __init__(self, host: WorkerHost) -> None:
        self.fault: Fault | None = None
        self.num_faults = 0
        super().__init__(host)

    def run(self, plan: StepPlan) -> StepResult:
        error = None if self.fault is None else self.fault(plan)
        if error is not None:
            self.num_faults += 1
            raise error
        return super().run(plan)

    def once(self, fault: Fault) -> None:
        """`fault` until it has raised."""
        before = self.num_faults
        self.fault = lambda plan: fault(plan) if self.num_faults == before else None
