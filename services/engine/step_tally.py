"""Counts what steps have done since the engine started. Pure.

Owns: the counts. The step thread writes them; other threads may read single numbers at any time, without the lock.
Never: the names of the counts in metrics, or decisions made from them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from services.core.step_average import StepAverage
from services.engine.schedule.sequence import StepPlan, StepResult

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds of the buckets of the histogram of sequences in a step."""
STEP_DURATIONS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the buckets of the histogram of step durations, in seconds."""
PARTS = ("schedule", "inputs", "model", "masks", "sample", "absorb")
"""Parts of a step's time, in order: choosing what runs; putting its inputs on the device; the forward pass, of which an
accelerator counts only the start; waiting for masks of constraints, which are computed beside it; sampling, which on an
accelerator includes the wait for the forward pass; absorbing the result."""


class Buckets:
    """Counts values in a histogram, and keeps their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        """Number of values in each bucket: above the bound before and at most its own. The last bucket has those above
        all bounds. The numbers are not cumulative."""
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class StepTally:
    """Keeps the counts of one engine. All but the averages only grow."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_failed = 0
        self.prefill_tokens = 0
        """Tokens of prompts, and tokens computed again after a preemption or in a replay."""
        self.decode_tokens = 0
        """Tokens that decoding sequences computed."""
        self.sampled_tokens = 0
        """Tokens that steps produced."""
        self.prefill_step = StepAverage()
        """Averages the newest steps that computed tokens of prompts, and decodes beside them."""
        self.decode_step = StepAverage()
        """Averages the newest steps that only decoded."""
        self.seconds = 0.0
        """Sum of the durations of all steps, without the time in which they were absorbed."""
        self.part_seconds = dict.fromkeys(PARTS, 0.0)
        """Seconds of each of `PARTS` over all steps. Steps that raised count only in "schedule" and "absorb"."""
        self.batch_sizes = Buckets(BATCH_SIZES)
        self.durations = Buckets(STEP_DURATIONS_S)

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    def step(
        self,
        plan: StepPlan,
        result: StepResult | Exception,
        started_s: float,
        ended_s: float,
        *,
        held_up: bool = False,
    ) -> None:
        """Counts a step that has run or raised. `started_s` is when its scheduling began, and `ended_s` when the runner
        returned or raised, before the result is absorbed; both are the engine clock's, in seconds. `held_up` says that
        it did not run for most of that time: it shows nothing of what steps take, and is in no average."""
        self.ran(
            ended_s - started_s,
            num_prefill_tokens=plan.num_prefill_tokens,
            num_decode_tokens=plan.num_decodes,
            num_sequences=len(plan.sequences),
            attended_tokens=plan.attended_tokens,
            failed=isinstance(result, Exception),
            held_up=held_up,
        )
        if isinstance(result, Exception):
            return
        self.sampled_tokens += sum(map(len, result.sampled.values()))
        for name in ("inputs", "model", "masks", "sample"):
            self.part_seconds[name] += getattr(result, f"{name}_s")

    def ran(
        self,
        seconds: float,
        *,
        num_prefill_tokens: int,
        num_decode_tokens: int,
        num_sequences: int,
        attended_tokens: int,
        failed: bool = False,
        held_up: bool = False,
    ) -> None:
        """Counts a step of `seconds`, for what computes by itself and has no plan."""
        self.num_steps += 1
        self.decode_tokens += num_decode_tokens
        self.prefill_tokens += num_prefill_tokens
        self.seconds += seconds
        self.batch_sizes.add(num_sequences)
        self.durations.add(seconds)
        if failed:
            self.num_failed += 1
        if failed or held_up:
            return
        figures = (seconds * 1e3, num_prefill_tokens + num_decode_tokens, attended_tokens)
        if num_prefill_tokens:
            self.prefill_step = self.prefill_step.after(*figures)
        else:
            self.decode_step = self.decode_step.after(*figures)

    def scheduled(self, seconds: float) -> None:
        """Adds the seconds in which a step was scheduled."""
        self.part_seconds["schedule"] += seconds

    def absorbed(self, seconds: float) -> None:
        """Adds the seconds in which a step's result was absorbed."""
        self.part_seconds["absorb"] += seconds
