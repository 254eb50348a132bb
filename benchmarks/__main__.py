"""Runs benchmarks: `python -m benchmarks [--only engine,split,…] [--repeats N] [--json FILE]` prints a table, and
writes a result file.

router      what placing requests costs the router's event loop
engine      one stream, a long prompt, a batch; step time over batch and context
transfer    KV blocks from process to process, against a copy in memory
split       prefill and decode apart against together, at equal cores: prompts beside streams, and a replayed trace
serve       streams over gRPC and HTTP against the engine alone, on one core
end_to_end  a cluster's start, handoffs of long prompts, memory
overload    goodput at one, two and three times a cluster's capacity
tracing     the cost of spans
sim         the simulator against real processes; not part of a run without --only
plan        a plan against the cluster it names; not part of a run without --only
dtype       what --dtype auto chooses between, on lesser CPUs too; not part of a run without --only

Beside other engines: `python -m benchmarks.peers`. Pictures of results: `python -m benchmarks.plots`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from pathlib import Path

from benchmarks import interference, planned, replay, router, serve
from benchmarks.precision import Precision
from benchmarks.result import Result
from benchmarks.settings import add_flags, read
from benchmarks.works import WorkSettings

NAMES = ("router", "engine", "transfer", "split", "serve", "end_to_end", "overload", "tracing", "dtype", "sim", "plan")
_BY_DEFAULT = ",".join(name for name in NAMES if name not in ("dtype", "sim", "plan"))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=_BY_DEFAULT, help=f"some of {', '.join(NAMES)}, with commas")
    parser.add_argument("--model", default="", help="by default the one that Baton serves by default")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the engine alone")
    parser.add_argument("--prompt-tokens", type=int, default=1783, help="of the prompt that dtype times")
    parser.add_argument("--json", type=Path, default=Path("out/bench.json"), help="the result file")
    _add_settings(parser)
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := set(chosen) - set(NAMES):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(NAMES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that clusters and engines end with this process
    result = Result({name: value for name, value in vars(arguments).items() if name != "json"})
    if "router" in chosen:
        result.add(router.measure(arguments.repeats))
        chosen.remove("router")
    if chosen:
        _with_model(chosen, arguments, result)
    result.write(arguments.json)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "the model's precision", Precision)
    add_flags(parser, "engine", WorkSettings)
    add_flags(parser, "split: prompts beside streams", interference.InterferenceSettings)
    add_flags(parser, "split: a replayed trace", replay.ReplaySettings)
    add_flags(parser, "serve", serve.ServeSettings)
    add_flags(parser, "plan", planned.PlannedSettings)


def _with_model(chosen: list[str], arguments: argparse.Namespace, result: Result) -> None:
    """Runs the benchmarks that need a model, and torch, which takes long to load."""
    from benchmarks import dtype, end_to_end, engine, overload, simulated, split, tracing, transfer
    from services.cli.model_cache import DEFAULT_MODEL
    from services.cli.model_names import resolve_model

    name, repeats = arguments.model or DEFAULT_MODEL, arguments.repeats
    model = resolve_model(name).path
    precision = read(Precision, arguments).chosen_for(model)
    result.settings |= {"precision": dataclasses.asdict(precision)}
    print(f"{name} in {precision}", flush=True)
    if "transfer" in chosen:
        result.add(transfer.measure(repeats))
    if "engine" in chosen:
        result.add(engine.measure(model, precision, arguments.threads, repeats, read(WorkSettings, arguments)))
    if "split" in chosen:
        beside, trace = read(interference.InterferenceSettings, arguments), read(replay.ReplaySettings, arguments)
        result.add(split.measure(name, precision, repeats, beside, trace))
    if "serve" in chosen:
        result.add(serve.measure(name, str(model), precision, repeats, read(serve.ServeSettings, arguments)))
    if "end_to_end" in chosen:
        result.add(end_to_end.measure(name, precision, repeats))
    if "overload" in chosen:
        result.add(overload.measure(name, precision, repeats))
    if "tracing" in chosen:
        result.add(tracing.measure(name, precision, repeats))
    if "sim" in chosen:
        result.add(simulated.measure(name, precision, repeats, read(replay.ReplaySettings, arguments)))
    if "plan" in chosen:
        settings = read(planned.PlannedSettings, arguments)
        result.add(planned.measure(name, precision, repeats, read(replay.ReplaySettings, arguments), settings))
    if "dtype" in chosen:
        result.add(dtype.measure(model, arguments.prompt_tokens, repeats))


if __name__ == "__main__":
    main()
