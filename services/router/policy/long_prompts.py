"""Keeps long prompts off some of the prefill workers, so that short ones need not wait behind them. Pure.

Owns: which prompts are long, how many workers are kept for the others, and which. Never: which of the rest is best.

It is size-interval task assignment, as far as short prompts go: they get the workers that their share of the work is
worth. But short prompts may use all workers, and long ones may use a kept one that nobody seems to need. The length of
a prompt is what is to be computed of it: what a worker's prefix cache is known to have does not count for that worker.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.router.policy.views import Job, WorkerView, uncached_tokens

ISOLATIONS = ("off", "auto")
_MOST_WORKERS = 65536
"""For so many names of workers is kept when short prompts used them, before all are forgotten."""
_NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LongPromptConfig:
    isolation: str = "off"
    """One of `ISOLATIONS`: whether long prompts are kept off some workers, as far as that pays."""
    window: int = 256
    """How many of the newest prompts say which ones are long."""
    fewest: int = 32
    """With fewer prompts than these nothing is kept."""
    times_mean: float = 2.0
    """A prompt is long that is longer than so many times the mean."""
    most_short: float = 0.5
    """Only while the others are at most so large a share of the work is anything kept: else long prompts are too few,
    or not so long, and all workers together serve everybody sooner."""
    most_crowded: float = 1.1
    """So many workers are kept that those left to long prompts have at most so many times the mean work for it."""


class LongPrompts:
    """Keeps the lengths of the newest prompts, and when short ones last used each worker."""

    def __init__(self, config: LongPromptConfig) -> None:
        self._config = config
        self._newest: deque[int] = deque(maxlen=config.window)
        self._found: tuple[int, float] | None = None
        """What `_bounds` returns, until the next prompt arrives."""
        self._used_s: dict[str, float] = {}

    @property
    def is_on(self) -> bool:
        return self._config.isolation == "auto"

    def arrived(self, num_tokens: int) -> None:
        """Notes a prompt of which so many tokens are in no prefix cache."""
        if self.is_on:
            self._newest.append(num_tokens)
            self._found = None

    def started(self, worker_id: str, num_tokens: int, now: float) -> None:
        """Notes where a prompt was placed, of which so many tokens are not in the prefix cache there."""
        if self.is_on and not self.is_long(num_tokens):
            if len(self._used_s) >= _MOST_WORKERS:
                self._used_s.clear()
            self._used_s[worker_id] = now

    def is_long(self, num_tokens: int) -> bool:
        """Returns whether a prompt of so many tokens is kept off workers that have none of it in their prefix caches,
        if there are enough workers."""
        longest, share = self._bounds()
        return share > 0 and num_tokens > longest

    def kept(self, job: Job, workers: Sequence[WorkerView], now: float) -> frozenset[str]:
        """Returns those of the workers, each of which could run the job's prompt, that it is to leave to shorter ones:
        never all of them, and of the same ones while the number of workers does not change.

        A worker that has so much of the prompt in its prefix cache that the rest is not long is not left to others.
        """
        if not self.is_long(job.num_tokens):
            return _NOBODY
        _, share = self._bounds()
        needed = math.ceil((1 - share) * len(workers) / self._config.most_crowded)
        kept = sorted(workers, key=lambda worker: worker.worker_id)[: len(workers) - needed]
        uncached = uncached_tokens(kept, job)
        return frozenset(worker.worker_id for worker in kept if not self._may_use(worker, uncached, now))

    def _may_use(self, worker: WorkerView, uncached: Mapping[str, int], now: float) -> bool:
        num_tokens = uncached[worker.worker_id]
        return not self.is_long(num_tokens) or self._is_free(worker, num_tokens, now)

    def _is_free(self, worker: WorkerView, num_tokens: int, now: float) -> bool:
        """Returns whether a kept worker is idle, and short prompts have not needed it for as long as so many tokens
        take there: those that come meanwhile wait for all of them. A worker that has measured nothing is not free."""
        takes_s = num_tokens * worker.load.ms_per_prefill_token / 1000
        return worker.idle and takes_s > 0 and now - self._used_s.get(worker.worker_id, -math.inf) >= takes_s

    def _bounds(self) -> tuple[int, float]:
        """Returns the longest prompt that is not long, and the share of the work that these are; (0, 0) if nothing is
        to be kept."""
        if self._found is None:
            config, lengths, self._found = self._config, self._newest, (0, 0.0)
            if len(lengths) >= config.fewest:
                work = sum(lengths)
                longest = int(config.times_mean * work / len(lengths))
                share = sum(length for length in lengths if length <= longest) / work
                if share <= config.most_short:
                    self._found = (longest, share)
        return self._found
