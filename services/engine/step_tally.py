"""What steps have done since the engine started, as counts that only grow. Pure.

Owns: the counts. The step thread writes them; others read single numbers of them at any time, without the lock. Never:
what they are called outside, or what follows from them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from services.engine.sequence import StepPlan, StepResult

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sequences in a step."""
STEP_DURATIONS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
PARTS = ("schedule", "inputs", "model", "sample", "absorb")
"""Of a step, in order: choosing what runs; its inputs on the device; the forward pass; sampling, which on an
accelerator waits for the forward pass too; taking in what came out."""


class Buckets:
    """A histogram: how many values were at most each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        """Each for itself, not cumulated; the last is of values above all bounds."""
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class StepTally:
    def __init__(self) -> None:
        self.num_steps = 0
        self.num_failed = 0
        self.prefill_tokens = 0
        """Of prompts and of what is computed again."""
        self.decode_tokens = 0
        self.sampled_tokens = 0
        self.last_batch_size = 0
        self.seconds = 0.0
        self.part_seconds = dict.fromkeys(PARTS, 0.0)
        self.batch_sizes = Buckets(BATCH_SIZES)
        self.durations = Buckets(STEP_DURATIONS_S)

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    def step(self, plan: StepPlan, result: StepResult | Exception, started_s: float, ended_s: float) -> None:
        """A step has run, or raised, between scheduling and absorbing."""
        self.num_steps += 1
        self.decode_tokens += plan.num_decodes
        self.prefill_tokens += plan.num_tokens - plan.num_decodes
        self.last_batch_size = len(plan.sequences)
        self.seconds += ended_s - started_s
        self.batch_sizes.add(len(plan.sequences))
        self.durations.add(ended_s - started_s)
        if isinstance(result, Exception):
            self.num_failed += 1
            return
        self.sampled_tokens += len(result.sampled)
        for name, seconds in (("inputs", result.inputs_s), ("model", result.model_s), ("sample", result.sample_s)):
            self.part_seconds[name] += seconds

    def scheduled(self, seconds: float) -> None:
        self.part_seconds["schedule"] += seconds

    def absorbed(self, seconds: float) -> None:
        self.part_seconds["absorb"] += seconds
