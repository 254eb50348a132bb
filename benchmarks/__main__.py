"""`python -m benchmarks [--only engine,transfer,…] [--repeats N] [--json FILE]`: a table, and JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path

import torch

from benchmarks import end_to_end, engine, overload, tracing, transfer
from benchmarks.figure import Figure, table
from services.cli.model_cache import DEFAULT_MODEL, resolve_model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default="engine,transfer,end_to_end,overload,tracing")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, default=Path("out/bench.json"))
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    model = resolve_model(arguments.model).path
    figures: list[Figure] = []
    if "end_to_end" in chosen:
        figures += end_to_end.measure(arguments.model, arguments.repeats)
    if "overload" in chosen:
        figures += overload.measure(arguments.model, arguments.repeats)
    if "transfer" in chosen:
        figures += transfer.measure(arguments.repeats)
    if "tracing" in chosen:
        figures += tracing.measure(arguments.model, arguments.repeats)
    if "engine" in chosen:
        figures += engine.measure(model, arguments.threads, arguments.repeats)
    machine = {"cpu": _cpu_name(), "cores": os.cpu_count(), "threads": arguments.threads, "torch": torch.__version__}
    print(f"{machine['cpu']}, {machine['cores']} cores; {platform.platform()}; torch {torch.__version__}\n")
    print(table(figures))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    plain = {"machine": machine, "figures": [figure.plain() for figure in figures]}
    arguments.json.write_text(json.dumps(plain, indent=1) + "\n")
    print(f"\nwritten to {arguments.json}")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
    amx = "amx_bf16" in Path("/proc/cpuinfo").read_text()
    return f"{name} ({'with' if amx else 'no'} AMX)"


if __name__ == "__main__":
    main()
