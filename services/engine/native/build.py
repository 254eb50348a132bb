"""Compiles the C files beside it once for each instruction set and type of elements.

Run as `python -m services.engine.native.build [--fetch-compiler]`. The compiler is `$CC`, or gcc, cc or clang, or that
of the Python package ziglang. Where there is none of them, `--fetch-compiler` has pip fetch that package into a folder
that is deleted after the build.

Owns: which compiler is used, with which flags. Never: whether the result is right (each user of a kernel checks that at
load). Baton runs without the kernels, so a missing compiler is only reported; a compiler that fails is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from services.engine.native.instruction_sets import WITHOUT_KERNELS, InstructionSet, instruction_sets

_FOLDER = Path(__file__).parent
_COMPILE = ("-O3", "-ffast-math", "-fPIC", "-std=gnu11", "-Wno-psabi")
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


_ZIG = "ziglang==0.17.1"
_OLDEST_GLIBC = "2.28"
"""The oldest glibc of the systems on which torch runs."""


@dataclass(frozen=True)
class Compiler:
    """Holds a command that compiles C as gcc does."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, arguments: Sequence[str]) -> str:
        """Returns what went wrong, or an empty text."""
        command = [*self.command, *map(self._adapted, arguments)]
        environment = {**os.environ, **self.environment}
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return f"{shlex.join(command)} failed\n{result.stderr}" if result.returncode else ""

    def _adapted(self, argument: str) -> str:
        is_march_for_zig = argument.startswith("-march=") and "ziglang" in self.command
        return argument.replace("x86-64-", "x86_64_") if is_march_for_zig else argument


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Builds the CPU kernels.")
    parser.add_argument("--fetch-compiler", action="store_true", help="with pip, for this build, where there is none")
    arguments = parser.parse_args(argv)
    with _compiler(fetch=arguments.fetch_compiler) as compiler:
        return 0 if compiler is None else _build_all(compiler)


@contextlib.contextmanager
def _compiler(*, fetch: bool) -> Iterator[Compiler | None]:
    """Yields the compiler to use; None if there is none, which it says."""
    given = shlex.split(os.environ.get("CC", ""))
    found = given or [path for name in ("gcc", "cc", "clang") if (path := shutil.which(name))][:1]
    if found and shutil.which(found[0]):
        yield Compiler(tuple(found))
    elif given:
        print(f"CC={given[0]} is not there, so no CPU kernels: {WITHOUT_KERNELS}")
        yield None
    elif importlib.util.find_spec("ziglang") is not None:
        yield _zig({})
    elif fetch:
        with tempfile.TemporaryDirectory(prefix="baton-compiler-") as folder:
            print(f"no C compiler: fetching one ({_ZIG}, 100 MB) for the CPU kernels", flush=True)
            caches = {f"ZIG_{kind}_CACHE_DIR": str(Path(folder, "cache")) for kind in ("GLOBAL", "LOCAL")}
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            if subprocess.run([*pip, "--target", folder, _ZIG], check=False).returncode:
                print(f"there is none to be had, so no CPU kernels: {WITHOUT_KERNELS}")
                yield None
            else:
                yield _zig({"PYTHONPATH": folder, **caches})
    else:
        print(f"no C compiler, so no CPU kernels: {WITHOUT_KERNELS}")
        yield None


def _zig(environment: dict[str, str]) -> Compiler:
    # Without a target it would compile for this very processor.
    target = ("-target", f"{platform.machine()}-linux-gnu.{_OLDEST_GLIBC}")
    return Compiler((sys.executable, "-m", "ziglang", "cc", *target), environment)


def _build_all(compiler: Compiler) -> int:
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
    print(f"built the CPU kernels for {', '.join(built)} with {shlex.join(compiler.command)}")
    return 0


def _build(compiler: Compiler, wanted: InstructionSet) -> str:
    """Builds one library; returns why it could not, or an empty text."""
    with tempfile.TemporaryDirectory(dir=wanted.shared_object.parent) as folder:
        objects = {Path(folder, f"{number}.o"): part for number, part in enumerate(_PARTS)}
        library = Path(folder, wanted.shared_object.name)
        for arguments in (
            *(
                [*_COMPILE, *flags, *wanted.compiler_flags, "-c", str(_FOLDER / source), "-o", str(compiled)]
                for compiled, (source, flags) in objects.items()
            ),
            ["-shared", *map(str, objects), "-o", str(library)],
        ):
            if error := compiler.run(arguments):
                return error
        os.replace(library, wanted.shared_object)  # a process that has the old library loaded keeps it
    return ""


if __name__ == "__main__":
    sys.exit(main())
