"""Measures what `--dtype auto` is a rule for: a prompt and a decode in each type, over the weights as saved and as a
GGUF file, GPTQ or AWQ checkpoint has them, on this CPU and on the lesser CPUs that torch, oneDNN and Baton's kernels
make of it when some of its instructions are switched off.

`python -m benchmarks.dtype MODEL DTYPE QUANTIZATION PROMPT_TOKENS REPEATS` measures one way in this process, on one
thread, and prints JSON: torch reads the variables that switch instructions off only once, so each measurement has a
process of its own. It counts the process's processor time, so it does not matter what else the machine does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.engine import Load
from benchmarks.figure import Figure
from services.cli.dtype_choice import choose_dtype, kept_weights
from services.engine.config import EngineConfig
from services.engine.loading import torch_engine
from services.engine.native.instruction_sets import cpu_flags

DTYPES = ("bfloat16", "float16", "float32")
_KINDS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("AMX", "amx_bf16", {}),
    ("AVX-512 with bfloat16", "avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}),
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
"""A kind of CPU, the flag in /proc/cpuinfo that a CPU must have to be one, and the variables that make it one."""
_NUM_DECODES = 32


def measure(model: Path, prompt_tokens: int, repeats: int) -> list[Figure]:
    kept = kept_weights(model)
    ways = [(dtype, weights) for weights in ("none", *([kept] if kept else [])) for dtype in DTYPES]
    figures = []
    for kind, flag, variables in _KINDS:
        for dtype, weights in ways if flag in cpu_flags() else ():
            found = run(model, dtype, weights, prompt_tokens, repeats, variables)
            name = f"{kind}, {dtype}" + (f" over {weights}" if weights != "none" else "")
            target = "what auto chooses" if found["auto"] == [dtype, weights] else ""
            figures.append(Figure(f"{name}: a token of a prompt of {prompt_tokens}", "ms", tuple(found["prefill_ms"])))
            figures.append(Figure(f"{name}: decode", "ms", tuple(found["decode_ms"]), target))
    return figures


def run(
    model: Path, dtype: str, quantization: str, prompt_tokens: int, repeats: int, variables: Mapping[str, str]
) -> dict[str, Any]:
    """Returns milliseconds of processor time a prompt token, and a decode, in a process with these variables."""
    command = [sys.executable, "-m", "benchmarks.dtype", str(model), dtype, quantization, str(prompt_tokens)]
    child = subprocess.run(
        [*command, str(repeats)], env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=True
    )
    answer = json.loads(child.stdout.strip().splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def _processor_s(load: Load, num_prompt_tokens: int, max_tokens: int) -> float:
    began_s = time.process_time()
    load.run(1, num_prompt_tokens, max_tokens)
    return time.process_time() - began_s


def main() -> None:
    model, dtype, quantization = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    prompt_tokens, repeats = int(sys.argv[4]), int(sys.argv[5])
    config = EngineConfig(
        str(model), "m", dtype=dtype, quantization=quantization, num_blocks=256, threads=1, max_num_batched_tokens=256
    )
    engine = torch_engine(config)
    load = Load(engine)
    prefill_ms, decode_ms = [], []
    try:
        load.run(1, prompt_tokens, 2)  # what is allocated or compiled once
        for _ in range(repeats):
            prefill_ms.append(_processor_s(load, prompt_tokens, 1) / prompt_tokens * 1e3)
            short_s = _processor_s(load, 16, 1)
            decode_ms.append((_processor_s(load, 16, 1 + _NUM_DECODES) - short_s) / _NUM_DECODES * 1e3)
    finally:
        engine.stop()
        engine.cache.close()
    choice = choose_dtype("auto", "cpu", model)
    print(json.dumps({"prefill_ms": prefill_ms, "decode_ms": decode_ms, "auto": [choice.dtype, choice.quantization]}))


if __name__ == "__main__":
    main()
