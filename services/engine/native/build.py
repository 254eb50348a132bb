"""Compiles the C files beside it once for each instruction set and type of elements.

Run as `python -m services.engine.native.build`.
Owns: which compiler is used, with which flags. Never: whether the result is right (each user of a kernel checks that at
load). Baton runs without the kernels, so a missing compiler is only reported; a compiler that fails is an error.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services.engine.native.instruction_sets import WITHOUT_KERNELS, InstructionSet, instruction_sets

_FOLDER = Path(__file__).parent
_COMPILE = ("-O3", "-ffast-math", "-fPIC", "-fopenmp", "-std=gnu11", "-Wno-psabi")
_PARTS = (
    *(
        (source, (f"-D{each}",))
        for source in ("attention.c", "elementwise.c", "linear.c")
        for each in ("FLOAT32", "BFLOAT16", "FLOAT16")
    ),
    ("quantised.c", ("-fno-fast-math",)),
)
"""The files of a library and the flags of each. Those with a macro are compiled for each type of elements (elements.h).
Quantised products round where they say they do, so that instruction sets never differ by a step."""


def main() -> int:
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("gcc") or shutil.which("cc") or ""]
    if shutil.which(compiler[0]) is None:
        missing = f"CC={compiler[0]} is not there" if compiler[0] else "no C compiler"
        print(f"{missing}, so no CPU kernels: {WITHOUT_KERNELS}")
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
    print(f"built the CPU kernels for {', '.join(built)} with {shlex.join(compiler)}")
    return 0


def _build(compiler: list[str], wanted: InstructionSet) -> str:
    """Builds one library; returns why it could not, or an empty text."""
    with tempfile.TemporaryDirectory(dir=wanted.shared_object.parent) as folder:
        objects = {Path(folder, f"{number}.o"): part for number, part in enumerate(_PARTS)}
        library = Path(folder, wanted.shared_object.name)
        for command in (
            *(
                [*compiler, *_COMPILE, *flags, *wanted.compiler_flags, "-c", str(_FOLDER / source), "-o", str(compiled)]
                for compiled, (source, flags) in objects.items()
            ),
            # Linked without -fopenmp: an OpenMP runtime beside torch's would be a second pool of threads.
            [*compiler, "-shared", *map(str, objects), "-o", str(library)],
        ):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                return f"{' '.join(command)} failed\n{result.stderr}"
        os.replace(library, wanted.shared_object)  # a process that has the old library loaded keeps it
    return ""


if __name__ == "__main__":
    sys.exit(main())
