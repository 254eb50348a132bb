"""Measures where the time of a decode step goes.

`python -m benchmarks.profile [--precisions float32,bfloat16,auto+auto] [--kv-dtype auto] [--streams 1,32]
[--prompt-tokens 64] [--repeats 3]` runs an engine in each precision, over a KV cache of this type, and prints, for
each number of streams, the median milliseconds of a step's parts: those that the engine counts (`step_tally.PARTS`),
what is between two steps, and of the forward pass the calls of each kind of kernel. What is left of the
forward pass is Python around the kernels, and torch's operators.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine import Load, running
from benchmarks.figure import Figure, Findings
from benchmarks.precision import Precision, parse_precision
from benchmarks.result import Result
from services.cli.model_names import resolve_model
from services.core.process_config import DEFAULT_MODEL
from services.engine.config import StepReport
from services.engine.native.bindings import Kernels, kernels
from services.engine.native.layer_arguments import KINDS as LAYER_KINDS
from services.engine.native.layer_arguments import Seconds
from services.engine.step_tally import PARTS

_KINDS = {
    "linear": "linear layers",
    "quantised_product": "linear layers",
    "attention": "attention",
    "pack_rows": "attention",
    "rms_norm": "norms, gates, positions",
    "add_rms_norm": "norms, gates, positions",
    "silu_gate": "norms, gates, positions",
    "rotate": "norms, gates, positions",
}
assert set(_KINDS.values()) == set(LAYER_KINDS)
_REST = "Python and torch around them"
_BETWEEN = "between steps"


class Profile:
    """Notes the parts of each step that only decodes."""

    def __init__(self, load: Load, native: Kernels | None) -> None:
        self.steps: dict[int, list[dict[str, float]]] = defaultdict(list)
        """Milliseconds by part, of each step, by the number of its sequences."""
        self._load = load
        self._kernels: dict[str, float] = dict.fromkeys(_KINDS.values(), 0.0)
        self._in_layers = Seconds()
        self._before = self._counts()
        self._reported_s = time.perf_counter()
        self._native, self._untimed = native, dict(vars(native)) if native is not None else {}
        if native is not None:
            self._time(native)
        load.also = self.on_step

    def close(self) -> None:
        """Makes the kernels as they were: another engine takes their addresses."""
        if self._native is not None:
            vars(self._native).update(self._untimed)

    def on_step(self, report: StepReport) -> None:
        """Notes what the step has added to the counts."""
        counts, now_s = self._counts(), time.perf_counter()
        added = {part: counts[part] - self._before[part] for part in counts}
        between_s = now_s - self._reported_s - sum(added[part] for part in PARTS)
        self._before, self._reported_s = counts, now_s
        if not report.step_number or report.num_tokens != report.num_decodes:
            return
        rest_s = added["model"] - sum(added[kind] for kind in set(_KINDS.values()))
        found = {**added, _REST: rest_s, _BETWEEN: between_s}
        self.steps[report.num_decodes].append({part: seconds * 1e3 for part, seconds in found.items()})

    def _counts(self) -> dict[str, float]:
        in_layers = dict(zip(LAYER_KINDS, self._in_layers, strict=False))
        kernels = {kind: seconds + in_layers[kind] for kind, seconds in self._kernels.items()}
        return {**self._load.engine.tally.part_seconds, **kernels}

    def _time(self, native: Kernels) -> None:
        """Makes each function of the library add its time to its kind's."""
        native.layer_seconds = self._in_layers
        for name, kind in _KINDS.items():
            found = getattr(native, f"_{name}")
            timed: Any = (
                self._timed(found, kind)
                if callable(found)
                else {dtype: self._timed(function, kind) for dtype, function in found.items()}
            )
            setattr(native, f"_{name}", timed)

    def _timed(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started_s = time.perf_counter()
            result = function(*arguments)
            self._kernels[kind] += time.perf_counter() - started_s
            return result

        return call


def measure(
    model: Path,
    precision: Precision,
    threads: int,
    streams: tuple[int, ...],
    num_prompt_tokens: int,
    repeats: int,
    steps: int,
) -> Findings:
    """Returns the median time of each part of a decode step, of each number of streams; a sample for each round."""
    found: Findings = []
    samples: dict[tuple[int, str], list[float]] = defaultdict(list)
    with running(model, precision, threads) as load:
        profile = Profile(load, kernels())
        for _ in range(repeats):
            for count in streams:
                profile.steps.clear()
                load.run(count, num_prompt_tokens, 1 + steps)
                noted = profile.steps[count]
                for part in noted[0]:
                    samples[count, part].append(statistics.median(step[part] for step in noted))
                whole = [sum(step[part] for part in (*PARTS, _BETWEEN)) for step in noted]
                samples[count, "a decode step"].append(statistics.median(whole))
        profile.close()
    kinds = {*_KINDS.values(), _REST}
    for count in streams:
        for part in ("a decode step", "schedule", "inputs", "model", *sorted(kinds), "sample", "absorb", _BETWEEN):
            name = f"{'  model: ' if part in kinds else ''}{part}"
            found.append(Figure(f"{precision}, {count} streams, {name}", "ms", tuple(samples[count, part])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--precisions", default="float32,bfloat16,auto+auto", help="see `python -m benchmarks.peers`")
    parser.add_argument("--kv-dtype", default="auto", help="type of the KV cache, as for baton up")
    parser.add_argument("--streams", default="1,32")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--steps", type=int, default=64, help="of each run")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("out/profile.json"))
    arguments = parser.parse_args()
    result = Result({name: value for name, value in vars(arguments).items() if name != "json"})
    model = resolve_model(arguments.model).path
    streams = tuple(map(int, arguments.streams.split(",")))
    for text in arguments.precisions.split(","):
        precision = dataclasses.replace(parse_precision(text), kv_dtype=arguments.kv_dtype).chosen_for(model)
        print(precision, flush=True)
        load = streams, arguments.prompt_tokens, arguments.repeats, arguments.steps
        result.add(measure(model, precision, arguments.threads, *load))
    result.write(arguments.json)


if __name__ == "__main__":
    main()
