"""Compiles the C files beside it once for each instruction set and type of elements.

Run as `python -m services.engine.native.build`.
Owns: which compiler is used, with which flags. Never: whether the result is right (each user of a kernel checks that at
load). Baton runs without the kernels, so a missing compiler is only reported; a compiler that fails is an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services.engine.native.instruction_sets import InstructionSet, instruction_sets

_SOURCES = sorted(Path(__file__).parent.glob("*.c"))
_ELEMENTS = ("FLOAT32", "BFLOAT16", "FLOAT16")
"""Macros, one of which says for what type of elements a file is compiled (elements.h)."""
_COMPILE = ("-O3", "-ffast-math", "-fPIC", "-fopenmp", "-std=gnu11", "-Wno-psabi")


def main() -> int:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        print("no C compiler: Baton runs without its CPU kernels (slower steps on CPUs)")
        return 0
    wanted = instruction_sets()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = dict(zip(wanted, pool.map(lambda each: _build(compiler, each), wanted), strict=True))
    for each, error in errors.items():
        if error:
            print(f"no CPU kernels for {each.name}: {error}", file=sys.stderr)
    built = [each.name for each, error in errors.items() if not error]
    if not built:
        print("Baton runs without its CPU kernels", file=sys.stderr)
        return 1
    print(f"built the CPU kernels for {', '.join(built)} with {compiler}")
    return 0


def _build(compiler: str, wanted: InstructionSet) -> str:
    """Builds one library; returns why it could not, or an empty text."""
    with tempfile.TemporaryDirectory(dir=wanted.shared_object.parent) as folder:
        objects = {Path(folder, f"{source.stem}-{each}.o"): (source, each) for source in _SOURCES for each in _ELEMENTS}
        library = Path(folder, wanted.shared_object.name)
        for command in (
            *(
                [compiler, *_COMPILE, *wanted.compiler_flags, f"-D{element}", "-c", str(source), "-o", str(compiled)]
                for compiled, (source, element) in objects.items()
            ),
            # Linked without -fopenmp: an OpenMP runtime beside torch's would be a second pool of threads.
            [compiler, "-shared", *map(str, objects), "-o", str(library)],
        ):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                return f"{' '.join(command)} failed\n{result.stderr}"
        os.replace(library, wanted.shared_object)  # a process that has the old library loaded keeps it
    return ""


if __name__ == "__main__":
    sys.exit(main())
