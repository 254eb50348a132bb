"""Measures the CPU kernels as different C compilers make them, on one thread.

`python -m benchmarks.compilers gcc "python -m ziglang cc -target x86_64-linux-gnu.2.28" [--limit avx2] [--repeats 3]`.
Each compiler builds the kernels in a copy of the code; then these time a prompt and a decode in turns
(`benchmarks.dtype`: processor time, so that it does not matter what else the machine does).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.figure import Figure, ratio
from benchmarks.result import Result
from services.cli.dtype_choice import saved_dtype
from services.cli.model_names import resolve_model
from services.core.config import KEPT_BLOCKS_FILE
from services.core.process_config import DEFAULT_MODEL

_ROOT = Path(__file__).resolve().parent.parent
_LIMITS = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
_PROMPT_TOKENS = "512"
_WORKS = ("ms a prompt token", "ms a decode")


def measure(compilers: list[str], model: Path, repeats: int, limits: dict[str, str]) -> list[Figure]:
    """Returns the times of each compiler and way of computing, and their ratios to the first compiler's."""
    saved = saved_dtype(model)
    assert saved is not None, f"{model} does not say its type"
    ways = [saved, "float32"]
    if (model / KEPT_BLOCKS_FILE).is_file():
        ways += [f"{way}+gguf" for way in ways]
    times: dict[tuple[str, str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copies = [_copy(Path(folder, str(number)), compiler, limits) for number, compiler in enumerate(compilers)]
        for _ in range(repeats):
            for compiler, environment in zip(compilers, copies, strict=True):
                for way in ways:
                    found = _timings(environment, model, way)
                    for work, time in zip(_WORKS, found, strict=True):
                        times.setdefault((way, work, compiler), []).append(time)
    figures = []
    for (way, work, compiler), samples in times.items():
        figures.append(Figure(f"{way}: {work}, {compiler}", "ms", tuple(samples)))
        if compiler != compilers[0]:
            first = times[way, work, compilers[0]]
            figures.append(ratio(f"{way}: {work}, {compiler} over {compilers[0]}", samples, first))
    return figures


def _copy(folder: Path, compiler: str, limits: dict[str, str]) -> dict[str, str]:
    """Copies the code and builds its kernels with the compiler. Returns the environment that uses the copy, limited."""
    for name in ("services", "gen", "benchmarks"):
        shutil.copytree(_ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    environment = {**os.environ, **limits, "PYTHONPATH": os.pathsep.join(str(folder / name) for name in ("", "gen"))}
    build = [sys.executable, "-m", "services.engine.native.build"]
    subprocess.run(build, env=environment | {"CC": compiler}, cwd=folder, check=True)
    return environment


def _timings(environment: dict[str, str], model: Path, way: str) -> list[float]:
    dtype, _, weights = way.partition("+")
    command = [sys.executable, "-m", "benchmarks.dtype", str(model), dtype, weights or "none", _PROMPT_TOKENS, "1"]
    child = subprocess.run(command, env=environment, cwd=environment["PYTHONPATH"].split(os.pathsep)[0], check=True,
                           stdout=subprocess.PIPE, text=True)  # fmt: skip
    found = json.loads(child.stdout.strip().splitlines()[-1])
    return [found["prefill_ms"][0], found["decode_ms"][0]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compilers", description=__doc__)
    parser.add_argument("compilers", nargs="+", metavar="COMPILER")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", choices=["avx2"], help="as on a CPU with no more than that")
    parser.add_argument("--json", type=Path, default=Path("out/compilers.json"))
    arguments = parser.parse_args()
    limits = _LIMITS if arguments.limit else {}
    result = Result({"compilers": arguments.compilers, "limits": limits, "repeats": arguments.repeats})
    result.add(measure(arguments.compilers, resolve_model(arguments.model).path, arguments.repeats, limits))
    result.write(arguments.json)


if __name__ == "__main__":
    main()
