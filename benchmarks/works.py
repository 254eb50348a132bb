"""Defines the three works by which engines are compared: one stream, one long prompt, a batch.

They are defined by one function that every engine has, in whatever environment it runs: `run`. So Baton and its peers
do the same, and what is computed of the times is written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.settings import setting

Run = Callable[[int, int, int], float]
"""run(count, num_prompt_tokens, max_tokens): seconds for `count` sequences that start at once, share no prefix and end
at `max_tokens`, never before."""


@dataclass(frozen=True)
class WorkSettings:
    batch: int = setting(32, "sequences of the work that is a batch")
    step_times: int = setting(1, "whether the engine's steps are timed over batch and context too: 0 or 1")


@dataclass(frozen=True)
class Work:
    name: str
    unit: str
    more_is_better: bool
    measure: Callable[[Run], float]


def works(batch: int) -> tuple[Work, ...]:
    """Returns the three works. The last has `batch` sequences."""
    return (
        Work("single stream", "tok/s", True, _single_stream),
        Work("prefill of 2048 tokens", "s", False, lambda run: run(1, 2048, 1)),
        Work(f"{batch} x (256 in, 64 out)", "tok/s", True, lambda run: batch * 64 / run(batch, 256, 64)),
    )


def _single_stream(run: Run) -> float:
    """Times 64 tokens after the first, whose time is that of the prompt."""
    return 64 / (run(1, 16, 65) - run(1, 16, 1))


def advantage(work: Work, ours: float, theirs: float) -> float:
    """Returns how many times as good ours is: of times the inverse."""
    return ours / theirs if work.more_is_better else theirs / ours
