"""Draws pictures of what result files hold, as SVG: `python -m benchmarks.plots RESULT.json… [--out FOLDER]`.

Lines of several files stand in one picture, each with its file's name, so that two machines or two versions can be seen
side by side. No file is drawn from anything but a result.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.figure import Series
from benchmarks.result import read_series
from services.sim.chart import Axis, Chart

CHARTS = {
    "itl": Chart(
        "Gaps between tokens while prompts arrive",
        Axis("inter-token latency, ms", logarithmic=True),
        Axis("tokens that waited no longer, %"),
        markers=False,
    ),
    "throughput_ttft": Chart(
        "Time to first token over throughput, replayed trace",
        Axis("output, tokens/s"),
        Axis("time to first token, p95, ms"),
    ),
    "throughput_tpot": Chart(
        "Time per output token over throughput, replayed trace",
        Axis("output, tokens/s"),
        Axis("time per output token, p95, ms"),
    ),
    **{
        f"sim_{name}": Chart(
            f"{title}: simulated against measured",
            Axis("time to first token and time per output token, ms", logarithmic=True),
            Axis("requests that took no longer, %"),
            markers=False,
        )
        for name, title in (
            ("split", "1 prefill + 1 decode worker"),
            ("mixed", "1 mixed worker"),
        )
    },
    "step_batch": Chart(
        "Decode step over batch", Axis("sequences in the step", logarithmic=True), Axis("step time, ms")
    ),
    "step_context": Chart(
        "Decode step over context", Axis("tokens of each sequence", logarithmic=True), Axis("step time, ms")
    ),
}


def draw(results: Mapping[str, Sequence[Series]]) -> dict[str, str]:
    """Returns the pictures by name. `results` are the lines of each file, by the file's name."""
    lines: dict[str, list[Series]] = {}
    for file_name, series in results.items():
        for each in series:
            name = f"{each.name} ({file_name})" if len(results) > 1 else each.name
            lines.setdefault(each.chart, []).append(dataclasses.replace(each, name=name))
    return {name: chart.svg(lines[name]) for name, chart in CHARTS.items() if name in lines}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="result files")
    parser.add_argument("--out", type=Path, default=Path("out/plots"), help="folder (default: out/plots)")
    arguments = parser.parse_args()
    pictures = draw({path.stem: read_series(path) for path in arguments.results})
    if not pictures:
        raise SystemExit("these results hold nothing to draw: run split or engine")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        path = arguments.out / f"{name}.svg"
        path.write_text(picture)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
