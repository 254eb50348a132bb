"""Compiles `kernels.c` to `kernels.so` beside it. Run as `python -m services.engine.native.build`.

Owns: which compiler is used, with which flags. Never: whether the result is right (each user of a kernel checks that at
load). Baton runs without the kernels, so a missing compiler is only reported; a compiler that fails is an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
LIBRARY = Path(__file__).with_name("kernels.so")
# Without -march, so that the library runs on every x86-64 CPU. The loader chooses code for newer instruction sets.
_COMPILE = ("-O3", "-ffast-math", "-fPIC", "-fopenmp", "-std=gnu11", "-Wno-psabi")


def main() -> int:
    """Builds the library. Returns the exit status: 1 if the compiler fails, else 0, also if there is no compiler."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        print("no C compiler: Baton runs without its CPU kernels (slower decodes in bfloat16)")
        return 0
    with tempfile.TemporaryDirectory(dir=LIBRARY.parent) as folder:
        compiled, library = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        for command in (
            [compiler, *_COMPILE, "-c", str(SOURCE), "-o", str(compiled)],
            # It is linked without -fopenmp: an OpenMP runtime beside torch's would have a second pool of threads.
            [compiler, "-shared", str(compiled), "-o", str(library)],
        ):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                print(
                    f"{' '.join(command)} failed; Baton runs without its CPU kernels\n{result.stderr}", file=sys.stderr
                )
                return 1
        os.replace(library, LIBRARY)  # a process that has the old library loaded keeps it
    print(f"built {LIBRARY.name} with {compiler}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
