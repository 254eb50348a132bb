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
from services.sim.chart import Axis, Chart, page

_PRESETS = (
    ("presets-mooncake", "Mooncake's trace", ("",)),
    ("presets-azure", "Azure's conversations", ("",)),
    ("presets-real-mooncake", "Mooncake's trace, small", ("simulated", "measured")),
    ("presets-real-azure", "Azure's conversations, small", ("simulated", "measured")),
)
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
    **{
        "-".join(filter(None, (stem, metric, how))): Chart(
            f"{title}{f', {how}' if how else ''}: {words}",
            Axis(f"{words}, ms", logarithmic=True),
            Axis(f"{counted} that waited no longer, %"),
            markers=False,
        )
        for stem, title, hows in _PRESETS
        for how in hows
        for metric, words, counted in (
            ("ttft", "time to first token", "requests"),
            ("itl", "inter-token latency", "tokens"),
        )
    },
    "transfer_prompt": Chart(
        "Handoffs of prompts, process to process on one host",
        Axis("tokens of the prompt (23 KB each)", logarithmic=True),
        Axis("GB/s"),
    ),
    "transfer_block": Chart(
        "Handoffs of 47 MB, process to process on one host",
        Axis("KiB of a block", logarithmic=True),
        Axis("GB/s"),
    ),
    "step_batch": Chart(
        "Decode step over batch", Axis("sequences in the step", logarithmic=True), Axis("step time, ms")
    ),
    "step_context": Chart(
        "Decode step over context", Axis("tokens of each sequence", logarithmic=True), Axis("step time, ms")
    ),
}

PAGES = {
    stem: tuple(tuple("-".join(filter(None, (stem, metric, how))) for how in hows) for metric in ("ttft", "itl"))
    for stem, _, hows in _PRESETS
}
"""Pictures that are several charts: rows from above, charts of a row from the left. Those of a row have the same
axes."""


def draw(results: Mapping[str, Sequence[Series]]) -> dict[str, str]:
    """Returns the pictures by name. `results` are the lines of each file, by the file's name."""
    lines: dict[str, list[Series]] = {}
    for file_name, series in results.items():
        for each in series:
            name = f"{each.name} ({file_name})" if len(results) > 1 else each.name
            lines.setdefault(each.chart, []).append(dataclasses.replace(each, name=name))
    of_pages = {name for rows in PAGES.values() for row in rows for name in row}
    pictures = {name: chart.svg(lines[name]) for name, chart in CHARTS.items() if name in lines.keys() - of_pages}
    for name, rows in PAGES.items():
        shown = [[(CHARTS[each], lines[each]) for each in row if each in lines] for row in rows]
        if any(shown):
            pictures[name] = page([row for row in shown if row])
    return pictures


def write(pictures: Mapping[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        path = folder / f"{name}.svg"
        path.write_text(picture)
        print(f"written to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="result files")
    parser.add_argument("--out", type=Path, default=Path("out/plots"), help="folder (default: out/plots)")
    arguments = parser.parse_args()
    pictures = draw({path.stem: read_series(path) for path in arguments.results})
    if not pictures:
        raise SystemExit("these results hold nothing to draw: run split, engine, transfer or presets")
    write(pictures, arguments.out)


if __name__ == "__main__":
    main()
