"""Simulates one workload under rules that each lack something: what batching, caches, chunks and splitting bring.

Each comparison leaves one thing out. Throughput at saturation is that of one worker to which all requests come at once;
static batches are as large as said.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.sim.cluster import ROUTER, SimPlan, simulate
from services.sim.profile import WorkerProfile
from services.sim.report import Objective, figure, summary
from services.sim.scheduler import WorkerRules
from services.sim.trace import TracedRequest

_MOST_AT_ONCE = 400
"""The most requests that come at once: enough that a worker's batch is full for long."""
_SMALL_BATCH = 8
"""A batch as systems without paging had it, whose pools were small: chosen, not computed."""
_MOST_ONE_BY_ONE = 50
"""The most that are computed one by one, of which each takes as long as it does alone."""


@dataclass(frozen=True)
class Ablation:
    """Names what one figure is with something, and without it."""

    what: str
    figure: str
    unit: str
    with_it: float
    without_it: float
    more_is_better: bool

    @property
    def gain(self) -> float:
        """Returns how many times as good it is with it; infinite if it is nothing at all without."""
        better, worse = (self.with_it, self.without_it) if self.more_is_better else (self.without_it, self.with_it)
        if better == worse:
            return 1.0
        return better / worse if worse else math.inf


def ablations(
    trace: Sequence[TracedRequest],
    profile: WorkerProfile,
    num_workers: int,
    objective: Objective,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Ablation]:
    """Returns what each thing brings on a number of workers; at least two, since one cannot be split."""
    return _Ablations(trace, profile, num_workers, objective, tell).found()


class _Ablations:
    def __init__(
        self,
        trace: Sequence[TracedRequest],
        profile: WorkerProfile,
        num_workers: int,
        objective: Objective,
        tell: Callable[[str], None],
    ) -> None:
        self._trace = trace
        self._crowd = [dataclasses.replace(each, at_s=0.0) for each in trace[:_MOST_AT_ONCE]]
        self._objective = objective
        self._tell = tell
        router = dataclasses.replace(ROUTER, max_queue=len(trace), queue_timeout_s=1e9)
        self._mixed = SimPlan(0, 0, num_workers, profile=profile, router=router)
        self._one = dataclasses.replace(self._mixed, mixed=1)

    def found(self) -> list[Ablation]:
        batching = self._batching()
        plain = self._run(f"{self._mixed.mixed} mixed", self._mixed, self._trace)
        return [*batching, *self._caches(plain), *self._chunks(plain), *self._split(plain)]

    def _run(self, what: str, plan: SimPlan, trace: Sequence[TracedRequest]) -> dict[str, Any]:
        self._tell(what)
        return summary(plan, simulate(plan, trace), self._objective)

    def _batching(self) -> list[Ablation]:
        """Compares throughput at saturation on one worker. Static batches are as large as the pool allows if each
        sequence sets the longest one's blocks apart, as systems without paging must."""
        profile = self._one.profile
        longest = max(each.prompt_tokens + each.output_tokens for each in self._trace)
        blocks = -(-longest // profile.block_size)
        batch = max(1, min(profile.max_num_seqs, profile.num_blocks // blocks))
        none = dataclasses.replace(self._one, rules=WorkerRules(prefix_caching=False))
        continuous = self._run("continuous batching", none, self._crowd)["output_tokens_per_s"]
        found = []
        for number in sorted({batch, min(batch, _SMALL_BATCH), 1}, reverse=True):
            static = dataclasses.replace(
                self._one,
                profile=dataclasses.replace(profile, max_num_seqs=number),
                rules=WorkerRules(static=True, prefix_caching=False),
            )
            crowd = self._crowd if number > 1 else self._crowd[:_MOST_ONE_BY_ONE]
            without = self._run(f"static batching, {number} at a time", static, crowd)["output_tokens_per_s"]
            what = f"continuous batching, not static ({number} at a time)"
            found.append(Ablation(what, "output at saturation", "tokens/s", continuous, without, True))
        return found

    def _caches(self, with_it: Mapping[str, Any]) -> list[Ablation]:
        without = dataclasses.replace(self._mixed, rules=WorkerRules(prefix_caching=False))
        none = self._run("without prefix caches", without, self._trace)
        what = f"prefix caches ({with_it['hit_rate']:.0%} of prompt tokens found)"
        return [
            Ablation(what, f"TTFT {percent}", "ms", with_it["ttft_ms"][percent], none["ttft_ms"][percent], False)
            for percent in ("p50", "p95")
        ]

    def _chunks(self, with_it: Mapping[str, Any]) -> list[Ablation]:
        whole = dataclasses.replace(self._mixed, rules=WorkerRules(chunked=False))
        none = self._run("prompts in one step", whole, self._trace)
        what = f"chunks of {self._mixed.profile.max_num_batched_tokens} tokens"
        return [
            Ablation(what, "ITL p99", "ms", with_it["itl_ms"]["p99"], none["itl_ms"]["p99"], False),
            Ablation(what, "TTFT p50", "ms", with_it["ttft_ms"]["p50"], none["ttft_ms"]["p50"], False),
        ]

    def _split(self, mixed: Mapping[str, Any]) -> list[Ablation]:
        """Compares mixed workers with the best division of as many into prefill and decode workers."""
        count = self._mixed.mixed
        splits = [
            (prefill, self._run(f"{prefill} prefill, {count - prefill} decode", plan, self._trace))
            for prefill in range(1, count)
            for plan in [dataclasses.replace(self._mixed, prefill=prefill, decode=count - prefill, mixed=0)]
        ]
        prefill, best = max(splits, key=lambda item: (item[1]["attainment"], -item[1]["itl_ms"]["p99"]))
        what = f"splitting ({prefill} prefill, {count - prefill} decode, not {count} mixed)"
        return [
            Ablation(what, "ITL p99", "ms", best["itl_ms"]["p99"], mixed["itl_ms"]["p99"], False),
            Ablation(what, "TTFT p95", "ms", best["ttft_ms"]["p95"], mixed["ttft_ms"]["p95"], False),
            Ablation(what, "goodput", "requests/s", best["goodput_per_s"], mixed["goodput_per_s"], True),
        ]


def table(found: Sequence[Ablation]) -> str:
    """Returns the comparisons as lines for people."""
    rows = [("what", "figure", "with", "without", "gain")]
    rows += [
        (
            each.what,
            each.figure,
            f"{figure(each.with_it)} {each.unit}",
            f"{figure(each.without_it)} {each.unit}",
            f"{each.gain:.2f} x",
        )
        for each in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
