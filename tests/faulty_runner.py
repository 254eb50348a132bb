"""A device whose steps raise when a test says so. Everything else is the real one's."""

from __future__ import annotations

from collections.abc import Callable

from services.engine.runner import Runner
from services.engine.sequence import StepPlan, StepResult
from services.worker.host import WorkerHost

Fault = Callable[[StepPlan], Exception | None]


def always(error: Exception) -> Fault:
    return lambda plan: error


def beyond(num_tokens: int, error: Exception) -> Fault:
    """Steps with a sequence that would be longer than `num_tokens`."""
    return lambda plan: error if any(part.start + part.num_tokens > num_tokens for part in plan.sequences) else None


class FaultyRunner:
    """Takes the place of a running worker's runner."""

    def __init__(self, host: WorkerHost) -> None:
        self.fault: Fault | None = None
        self.num_faults = 0
        self._runner: Runner = host.engine._runner
        host.engine._runner = self

    def run(self, plan: StepPlan) -> StepResult:
        error = None if self.fault is None else self.fault(plan)
        if error is not None:
            self.num_faults += 1
            raise error
        return self._runner.run(plan)

    def once(self, fault: Fault) -> None:
        """`fault` until it has raised."""
        before = self.num_faults
        self.fault = lambda plan: fault(plan) if self.num_faults == before else None

    def reclaim(self) -> None:
        self._runner.reclaim()
