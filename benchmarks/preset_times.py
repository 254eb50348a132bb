"""Describes what streams of requests waited for, by preset of placement: figures, lines of pictures, a table. Pure.

Percentiles are by nearest rank, of what was simulated and of what was measured alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.answers import QUANTILE_SHARES
from benchmarks.figure import Figure, Findings, Series

Counts = Mapping[float, int]
"""How often each value occurred."""


@dataclass(frozen=True)
class PresetTimes:
    """Holds what came of one run with one preset."""

    ttft_ms: Counts
    itl_ms: Counts
    hit_percent: float
    """Of the prompt tokens, those that were found in prefix caches of the workers that take prompts."""
    num_failed: int = 0


Rounds = Mapping[str, Sequence[PresetTimes]]
"""The runs of each preset, one a round."""

_COLUMNS: Mapping[str, tuple[str, Callable[[PresetTimes], float]]] = {
    "prompt tokens found in caches": ("%", lambda times: times.hit_percent),
    "TTFT p50": ("ms", lambda times: quantile(times.ttft_ms, 50)),
    "TTFT p95": ("ms", lambda times: quantile(times.ttft_ms, 95)),
    "ITL p50": ("ms", lambda times: quantile(times.itl_ms, 50)),
    "ITL p99": ("ms", lambda times: quantile(times.itl_ms, 99)),
}


def quantile(counts: Counts, percent: float) -> float:
    """Returns the least value that so many percent of all do not pass. Raises ValueError if there is none."""
    return _quantiles(counts, [percent])[0]


def figures(title: str, rounds: Rounds) -> Findings:
    """Returns the figures of each preset, with a sample for each round."""
    found: Findings = []
    for preset, runs in rounds.items():
        for name, (unit, value) in _COLUMNS.items():
            found.append(Figure(f"{title}, {preset}: {name}", unit, tuple(map(value, runs))))
        if any(times.num_failed for times in runs):
            failed = tuple(float(times.num_failed) for times in runs)
            found.append(Figure(f"{title}, {preset}: requests that failed, which have no times", "", failed))
    return found


def lines(chart: str, rounds: Rounds, how: str = "") -> list[Series]:
    """Returns the distributions of TTFT and ITL of each preset, all rounds together, for the charts `chart`-ttft and
    `chart`-itl, or `chart`-ttft-`how` and `chart`-itl-`how`."""
    found = []
    for metric in ("ttft", "itl"):
        name = "-".join(filter(None, (chart, metric, how)))
        for preset, runs in rounds.items():
            together: Counter[float] = Counter()
            for times in runs:
                together.update(times.ttft_ms if metric == "ttft" else times.itl_ms)
            percents = [100 * share for share in QUANTILE_SHARES]
            found.append(Series(name, preset, tuple(zip(_quantiles(together, percents), percents, strict=True))))
    return found


def markdown(simulated: Rounds, measured: Rounds | None = None) -> str:
    """Returns a table with a row for each preset: the simulated figures or, with `measured`, "simulated / measured".
    Figures are medians of rounds; behind measured ones stand the least and the most of several."""
    heads = [f"{name}, {unit}" for name, (unit, _) in _COLUMNS.items()]
    rows = [f"| preset | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for preset, runs in simulated.items():
        cells = []
        for name, (unit, value) in _COLUMNS.items():
            cell = _shown(Figure(name, unit, tuple(map(value, runs))).median)
            if measured is not None:
                real = Figure(name, unit, tuple(map(value, measured[preset])))
                cell += f" / {_shown(real.median)}"
                if len(real.samples) > 1:
                    cell += f" ({_shown(min(real.samples))}–{_shown(max(real.samples))})"
            cells.append(cell)
        rows.append(f"| `{preset}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _quantiles(counts: Counts, percents: Sequence[float]) -> list[float]:
    """Takes percents in growing order."""
    total = sum(counts.values())
    if not total:
        raise ValueError("no samples")
    ordered = iter(sorted(counts.items()))
    found: list[float] = []
    value, seen = next(ordered)
    for percent in percents:
        while seen * 100 < percent * total - 1e-6:
            value, more = next(ordered)
            seen += more
        found.append(value)
    return found
