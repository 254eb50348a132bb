"""Runs every preset of placement on the same traces: simulated, and through a real `baton up` with the same simulated
beside it.

`python -m benchmarks.presets --mooncake mooncake_synthetic.jsonl --azure azure_llm_2023_conv.csv --table
splitwise_perf_model.csv` does both, `--only simulated` or `--only real` one of them; a trace that is not named is left
out. It prints tables whose figures `docs/routing.md` has, and draws pictures with `--plots FOLDER`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from benchmarks import plots, presets_real, presets_simulated
from benchmarks.figure import Series
from benchmarks.precision import Precision
from benchmarks.preset_times import figures, lines, markdown
from benchmarks.presets_real import RealSettings
from benchmarks.presets_simulated import SimulatedSettings
from benchmarks.result import Result
from benchmarks.settings import add_flags, read
from services.cli.model_names import resolve_model
from services.core.process_config import DEFAULT_MODEL
from services.router.policy import PRESETS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.presets", description=__doc__)
    parser.add_argument("--mooncake", type=Path, help="Mooncake's trace")
    parser.add_argument("--azure", type=Path, help="Azure's conversations")
    parser.add_argument("--only", choices=("simulated", "real"), help="(default: both)")
    parser.add_argument("--presets", default=",".join(PRESETS), help="(default: all)")
    parser.add_argument("--model", default="", help="of the real runs, by default the one that Baton serves by default")
    parser.add_argument("--json", type=Path, default=Path("out/presets.json"), help="the result file")
    parser.add_argument("--plots", type=Path, help="folder for pictures (default: none are drawn)")
    add_flags(parser, "simulated", SimulatedSettings)
    add_flags(parser, "real", RealSettings)
    arguments = parser.parse_args()
    traces = {name: path for name in ("mooncake", "azure") if (path := getattr(arguments, name))}
    presets = arguments.presets.split(",")
    if not traces or (unknown := set(presets) - set(PRESETS)):
        parser.error("--mooncake or --azure is needed" if not traces else f"--presets: {', '.join(sorted(unknown))}?")
    if arguments.only != "real" and not arguments.table:
        parser.error("--table is needed, or --only real")
    result = Result({name: str(value) for name, value in vars(arguments).items() if name not in ("json", "plots")})
    tables: dict[str, str] = {}
    if arguments.only != "real":
        tables |= _simulated(traces, presets, read(SimulatedSettings, arguments), result)
    if arguments.only != "simulated":
        tables |= _real(arguments.model or DEFAULT_MODEL, traces, presets, read(RealSettings, arguments), result)
    result.write(arguments.json)
    for title, table in tables.items():
        print(f"\n{title}:\n\n{table}")
    if arguments.plots:
        plots.write(plots.draw({arguments.json.stem: result.series}), arguments.plots)


def _simulated(
    traces: Mapping[str, Path], presets: list[str], settings: SimulatedSettings, result: Result
) -> dict[str, str]:
    """Adds to the result, and returns a table for each trace."""
    tables = {}
    for name, path in traces.items():
        found = presets_simulated.measure(name, path, presets, settings)
        rounds = {preset: [times] for preset, times in found.items()}
        result.add([*figures(f"{name}, simulated", rounds), *lines(f"presets-{name}", rounds)])
        tables[f"{name}, simulated"] = markdown(rounds)
    return tables


def _real(
    model: str, traces: Mapping[str, Path], presets: list[str], settings: RealSettings, result: Result
) -> dict[str, str]:
    precision = Precision().chosen_for(resolve_model(model).path)
    tables = {}
    for name, both in presets_real.measure(model, precision, traces, presets, settings).items():
        found: list[Series] = []
        for how, rounds in (("simulated", both.simulated), ("measured", both.measured)):
            result.add(figures(f"small {name}, {how}", rounds))
            found += lines(f"presets-real-{name}", rounds, how)
        result.add(found)
        tables[f"small {name}, simulated / measured"] = markdown(both.simulated, both.measured)
    return tables


if __name__ == "__main__":
    main()
