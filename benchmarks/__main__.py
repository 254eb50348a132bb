"""`python -m benchmarks [--only engine,transfer,…] [--repeats N] [--json FILE]`: a table, and JSON.

Without `--only` everything runs but `dtype`, which emulates lesser CPUs and takes minutes for each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path

from benchmarks import router
from benchmarks.figure import Figure, table
from benchmarks.machine import cpu_name


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default="router,engine,transfer,end_to_end,overload,tracing")
    parser.add_argument("--model", default="", help="by default the one that Baton serves by default")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt-tokens", type=int, default=1783, help="of the prompt that dtype times")
    parser.add_argument("--json", type=Path, default=Path("out/bench.json"))
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()}
    print(f"{machine['cpu']}, {machine['cores']} cores; {platform.platform()}; Python {machine['python']}")
    figures: list[Figure] = []
    if "router" in chosen:
        figures += router.measure(arguments.repeats)
        chosen.remove("router")
    if chosen:
        figures += _with_model(chosen, arguments, machine)
    print("\n" + table(figures))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    plain = {"machine": machine, "figures": [figure.plain() for figure in figures]}
    arguments.json.write_text(json.dumps(plain, indent=1) + "\n")
    print(f"\nwritten to {arguments.json}")


def _with_model(chosen: list[str], arguments: argparse.Namespace, machine: dict[str, object]) -> list[Figure]:
    """What needs a model, and torch, which takes long to load."""
    import torch

    from benchmarks import dtype, end_to_end, engine, overload, tracing, transfer
    from services.cli.model_cache import DEFAULT_MODEL
    from services.cli.model_names import resolve_model

    machine |= {"threads": arguments.threads, "torch": torch.__version__}
    name = arguments.model or DEFAULT_MODEL
    model = resolve_model(name).path
    figures: list[Figure] = []
    if "end_to_end" in chosen:
        figures += end_to_end.measure(name, arguments.repeats)
    if "overload" in chosen:
        figures += overload.measure(name, arguments.repeats)
    if "transfer" in chosen:
        figures += transfer.measure(arguments.repeats)
    if "tracing" in chosen:
        figures += tracing.measure(name, arguments.repeats)
    if "engine" in chosen:
        figures += engine.measure(model, arguments.threads, arguments.repeats)
    if "dtype" in chosen:
        machine["threads"] = 1
        figures += dtype.measure(model, arguments.prompt_tokens, arguments.repeats)
    return figures


if __name__ == "__main__":
    main()
