"""Measures what `--dtype auto` chooses between: a prompt and a decode in the type a model was saved in and in float32,
on this CPU, and on the lesser CPUs that torch makes of it when some of its instructions are switched off.

`python -m benchmarks.dtype MODEL DTYPE PROMPT_TOKENS REPEATS` measures one type in this process and prints JSON: torch
reads the variables that switch instructions off only once, so each measurement has a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.engine import Load
from benchmarks.figure import Figure
from services.cli.dtype_choice import Timings, decide, saved_dtype
from services.engine.config import EngineConfig
from services.engine.loading import torch_engine

# A kind of CPU, the flag in /proc/cpuinfo that a CPU must have to be one, and the variables that make it one.
_KINDS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (
        "AVX-512 alone",
        "avx512f",
        {
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "ATEN_CPU_CAPABILITY": "avx512",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        },
    ),
    (
        "AVX2 alone",
        "avx2",
        {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    ),
)
_NUM_DECODES = 16


def measure(model: Path, prompt_tokens: int, repeats: int) -> list[Figure]:
    """Raises SystemExit if the model was saved in float32: there is nothing to choose."""
    saved = saved_dtype(model)
    if saved not in ("bfloat16", "float16"):
        raise SystemExit(f"{model} is saved in {saved or 'an unknown type'}: --dtype auto has nothing to choose")
    flags = Path("/proc/cpuinfo").read_text().split()
    kinds: list[tuple[str, Mapping[str, str]]] = [("AMX" if "amx_bf16" in flags else "as it is", {})]
    kinds += [(name, variables) for name, flag, variables in _KINDS if flag in flags]
    return [
        figure for name, variables in kinds for figure in _kind(name, variables, model, saved, prompt_tokens, repeats)
    ]


def _kind(
    name: str, variables: Mapping[str, str], model: Path, saved: str, prompt_tokens: int, repeats: int
) -> list[Figure]:
    found = _child(variables, "services.engine.cpu.dtype_timing", str(model), saved, saved, "float32")
    timings = {dtype: (float(prefill), float(decode)) for dtype, (prefill, decode) in found["timings"].items()}
    chosen = decide(saved, Timings(timings, str(found["capability"]))).dtype
    figures = []
    for dtype in (saved, "float32"):
        run = _child(variables, "benchmarks.dtype", str(model), dtype, str(prompt_tokens), str(repeats))
        target = "the type that auto chooses" if dtype == chosen else ""
        timed = "auto's timing of a {} (processor time)"
        figures += [
            Figure(f"{name}, {dtype}: prompt of {prompt_tokens} tokens", "s", tuple(run["prompt_s"]), target),
            Figure(f"{name}, {dtype}: decode", "ms", tuple(run["decode_ms"])),
            Figure(f"{name}, {dtype}: {timed.format('prompt token')}", "ms", (timings[dtype][0],)),
            Figure(f"{name}, {dtype}: {timed.format('decode')}", "ms", (timings[dtype][1],)),
        ]
    return figures


def _child(variables: Mapping[str, str], module: str, *arguments: str) -> dict[str, dict[str, list[float]]]:
    command = [sys.executable, "-m", module, *arguments]
    child = subprocess.run(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, dict[str, list[float]]] = json.loads(child.stdout.strip().splitlines()[-1])
    return answer


def main() -> None:
    model, dtype, prompt_tokens, repeats = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    config = EngineConfig(model, "m", dtype=dtype, num_blocks=256, threads=1, max_num_batched_tokens=512)
    engine = torch_engine(config)
    load = Load(engine)
    prompt_s, decode_ms = [], []
    try:
        for _ in range(repeats):
            prompt_s.append(load.run(1, prompt_tokens, 1))
            load.run(1, 16, 1 + _NUM_DECODES)
            times = load.token_times_s
            decode_ms.append((times[-1] - times[0]) / (len(times) - 1) * 1e3)
    finally:
        engine.stop()
        engine.cache.close()
    print(json.dumps({"prompt_s": prompt_s, "decode_ms": decode_ms}))


if __name__ == "__main__":
    main()
