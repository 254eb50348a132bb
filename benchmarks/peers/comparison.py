"""Measures several engines in rounds, and how many times as good Baton's are as each peer, and as the best of its kind.
Pure.

A kind is what the weights are: as they were saved, or of fewer bits. Engines of different kinds are compared too, but a
target is set against the best of the same kind, work by work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.figure import Figure
from benchmarks.works import Run, Work, advantage

UNQUANTISED, EIGHT_BITS, FOUR_BITS = "unquantised", "8-bit", "4-bit"
# Of Baton over the best peer of the same kind: single stream, prefill (the inverse of its time), batch.
_REQUIRED = {UNQUANTISED: (1.4, 1 / 0.6, 1.5), FOUR_BITS: (1.0, 1 / 0.9, 1.2)}


@dataclass
class Side:
    """Holds one engine in one precision, and what it has measured: for each work a sample a round."""

    name: str
    kind: str
    is_baton: bool
    run: Run
    samples: dict[str, list[float]] = field(default_factory=dict)

    def take(self, work: Work) -> None:
        self.samples.setdefault(work.name, []).append(work.measure(self.run))


def measure_in_turns(
    sides: Sequence[Side], works: Sequence[Work], repeats: int, tell: Callable[[str], None] = print
) -> None:
    """Measures each work with every side before the next work begins, so that both sides of a ratio are seconds apart.
    The first round warms up and is dropped."""
    for number in range(repeats + 1):
        for work in works:
            for side in sides:
                side.take(work)
                tell(f"round {number or 'that warms up'}: {side.name}, {work.name}: {side.samples[work.name][-1]:.4g}")
        if not number:
            for side in sides:
                side.samples.clear()


def figures(sides: Sequence[Side], works: Sequence[Work]) -> list[Figure]:
    """Returns what each side measured, then how many times as good Baton's are, round by round."""
    found = [
        Figure(f"{side.name}: {work.name}", work.unit, tuple(side.samples[work.name]))
        for work in works
        for side in sides
    ]
    for ours in (side for side in sides if side.is_baton):
        for number, work in enumerate(works):
            found += [
                _advantage(work, ours, theirs, "")
                for theirs in sides
                if not theirs.is_baton and theirs.kind != ours.kind
            ]
            same = [side for side in sides if not side.is_baton and side.kind == ours.kind]
            best = _best(work, same) if same else None
            for theirs in same:
                required = _REQUIRED.get(ours.kind)
                target = f">= {required[number]:.2f}, the best here" if required and theirs is best else ""
                found.append(_advantage(work, ours, theirs, target))
    return found


def _advantage(work: Work, ours: Side, theirs: Side, target: str) -> Figure:
    pairs = zip(ours.samples[work.name], theirs.samples[work.name], strict=True)
    better = tuple(advantage(work, one, other) for one, other in pairs)
    return Figure(f"{ours.name} over {theirs.name}: {work.name}", "x", better, target)


def _best(work: Work, sides: Sequence[Side]) -> Side:
    """Returns the side that is best by the median."""
    choose = max if work.more_is_better else min
    return choose(sides, key=lambda side: statistics.median(side.samples[work.name]))
