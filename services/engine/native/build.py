"""Compiles the C files beside it for an instruction set, once for each type of elements.

Run as `python -m services.engine.native.build [--fetch-compiler]`. It builds for the one instruction set that a process
with this environment would take; with `BATON_KERNELS=processor`, as tests and benchmarks need it, for all that this
processor has; with `BATON_KERNELS=all`, as images and releases need it, for all of the architecture. The compiler is
`$CC`, or gcc, cc or clang, or that of the Python package ziglang. Where none of them works, `--fetch-compiler` has pip
fetch that package into a folder that is deleted after the build. What was built is also kept in Baton's cache, so that
the next checkout on this machine copies it.

Owns: which compiler is used, with which flags. Never: whether the result is right (each user of a kernel checks that at
load). Baton runs without the kernels, so a missing compiler is only reported; one that fails is an error, unless
another is fetched in its place.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
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

from services.core.errors import ConfigError
from services.core.home import baton_home
from services.core.own_files import FOR_ALL, write_whole
from services.engine.native.instruction_sets import (
    SOURCES_SYMBOL,
    InstructionSet,
    instruction_sets,
    sources_digest,
    usable,
    without_kernels,
)

_WHICH = "BATON_KERNELS"
_FOLDER = Path(__file__).parent
_COMPILE = ("-O3", "-ffast-math", "-fPIC", "-std=gnu11", "-Wno-psabi", "-g0")
"""The flags of all files. zig writes debugging information unless told, with the paths of the machine that compiled."""
_OF_ELEMENTS = ("FLOAT32", "BFLOAT16", "FLOAT16")
_PARTS = (
    *(
        (source, (f"-D{each}",))
        for source in ("attention.c", "elementwise.c", "layers.c", "linear.c")
        for each in _OF_ELEMENTS
    ),
    *(("attention.c", (f"-D{each}", "-DINT8_ROWS")) for each in _OF_ELEMENTS),
    *(("int8_rows.c", (f"-D{each}", "-fno-fast-math", "-ffp-contract=off")) for each in _OF_ELEMENTS),
    ("quantised.c", ("-fno-fast-math",)),
)
"""The files of a library and the flags of each. Those with a macro of `_OF_ELEMENTS` are compiled for each type of
elements (elements.h), attention also over keys and values of 8 bits (stored_rows.h). What rounds to 8 bits does so
where it says it does, so that instruction sets never differ by a step."""

_TRIAL = """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
int baton_trial(void) { return 0; }
"""
"""What the kernels demand of a compiler before anything of theirs is compiled: their headers, and a linker."""

_ZIG = "ziglang==0.17.1"
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells
OLDEST_GLIBC = "2.28"
"""The oldest glibc of the systems on which torch runs."""


@dataclass(frozen=True)
class Compiler:
    """Holds a command that compiles C as gcc does."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    identity: str = ""
    """What it is, if that is known before it is fetched; else what it says by itself."""

    def builds(self, wanted: InstructionSet, sources: str) -> Path:
        """Returns where a library that this compiler makes of the sources is kept between builds."""
        about = (self.identity or self._version(), _COMPILE, _PARTS, wanted.compiler_flags)
        recipe = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
        return baton_home() / "native" / f"{sources}-{recipe}" / wanted.shared_object.name

    def _version(self) -> str:
        said = subprocess.run([*self.command, "--version"], capture_output=True, text=True, check=False)
        return shlex.join(self.command) + said.stdout

    def run(self, arguments: Sequence[str]) -> str:
        """Returns what went wrong, or an empty text."""
        command = [*self.command, *map(self._adapted, arguments)]
        environment = {**os.environ, **self.environment}
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        except OSError as error:
            return f"{shlex.join(command)} failed\n{error}"
        return f"{shlex.join(command)} failed\n{result.stderr}" if result.returncode else ""

    def _adapted(self, argument: str) -> str:
        is_march_for_zig = argument.startswith("-march=") and "ziglang" in self.command
        return argument.replace("x86-64-", "x86_64_") if is_march_for_zig else argument


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Builds the CPU kernels.")
    parser.add_argument("--fetch-compiler", action="store_true", help="with pip, for this build, where none works")
    arguments = parser.parse_args(argv)
    try:
        installed = _installed()
        if installed.compiler is None and arguments.fetch_compiler and _copy_kept(_zig({})):
            return 0
        with _compiler(installed, fetch=arguments.fetch_compiler) as compiler:
            return int(installed.is_broken) if compiler is None else _build_all(compiler)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


@dataclass(frozen=True)
class Installed:
    """Holds what this machine has to compile with."""

    compiler: Compiler | None
    """The one that works; None if there is none."""
    problem: str = "no C compiler"
    """Why there is none, for people."""
    is_broken: bool = False
    """Whether there is one that fails."""


def _installed() -> Installed:
    """Finds the compiler to use, and tries it: one without headers is as good as none."""
    try:
        given = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        return Installed(
            None, f"CC={os.environ['CC']} is no command ({error}); unset CC to use another", is_broken=True
        )
    if given and not shutil.which(given[0]):
        return Installed(None, f"CC={given[0]} is not there")
    found = [given] if given else [[path] for name in ("gcc", "cc", "clang") if (path := shutil.which(name))]
    problems = []
    for compiler in (Compiler(tuple(command)) for command in found):
        if not (why := _why_useless(compiler)):
            return Installed(compiler)
        name = f"CC={shlex.join(given)}" if given else compiler.command[0]
        problems.append(f"{name} compiles nothing ({why}){'; unset CC to use another' if given else ''}")
    if not given and importlib.util.find_spec("ziglang") is not None:
        return Installed(_zig({}))
    return Installed(None, problems[0], is_broken=True) if problems else Installed(None)


def _why_useless(compiler: Compiler) -> str:
    """Returns, in one line, why the compiler cannot make any library; an empty text if it can."""
    with tempfile.TemporaryDirectory(prefix="baton-trial-") as folder:
        source = Path(folder, "trial.c")
        source.write_text(_TRIAL)
        error = compiler.run([*_COMPILE, "-shared", str(source), "-o", str(source.with_suffix(".so"))])
    _, _, said = error.partition("\n")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), (lines or ["it says nothing"])[-1]) if error else ""


@contextlib.contextmanager
def _compiler(installed: Installed, *, fetch: bool) -> Iterator[Compiler | None]:
    """Yields the compiler to use; None if there is none, which it says."""
    if installed.compiler is not None:
        yield installed.compiler
    elif fetch:
        with tempfile.TemporaryDirectory(prefix="baton-compiler-") as folder:
            print(f"{installed.problem}: fetching one ({_ZIG}, 100 MB) for the CPU kernels", flush=True)
            caches = {f"ZIG_{kind}_CACHE_DIR": str(Path(folder, "cache")) for kind in ("GLOBAL", "LOCAL")}
            if _pip_install(_ZIG, folder):
                yield _zig({"PYTHONPATH": folder, **caches})
            else:
                print(f"there is none to be had, so no CPU kernels: {without_kernels()}")
                yield None
    elif installed.is_broken:
        print(f"{installed.problem}; Baton runs without its CPU kernels: {without_kernels()}", file=sys.stderr)
        yield None
    else:
        print(f"{installed.problem}, so no CPU kernels: {without_kernels()}")
        yield None


def _pip_install(requirement: str, folder: str) -> bool:
    """Installs the package into the folder, where pip also keeps all that it needs meanwhile; tells whether it did."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    scratch = Path(folder, "pip")
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    return subprocess.run([*pip, "--target", folder, requirement], check=False, env=environment).returncode == 0


def _zig(environment: dict[str, str]) -> Compiler:
    # Without a target it would compile for this very processor.
    target = ("-target", f"{platform.machine()}-linux-gnu.{OLDEST_GLIBC}")
    return Compiler((sys.executable, "-m", "ziglang", "cc", *target), environment, identity=_ZIG)


def _wanted() -> tuple[InstructionSet, ...]:
    which = os.environ.get(_WHICH)
    if which == "all":
        return instruction_sets()
    return usable({}) if which == "processor" else usable()[:1]


def _copy_kept(compiler: Compiler) -> bool:
    """Copies what this compiler has built before; tells whether that was all that is wanted."""
    sources = sources_digest()
    return all(copy_library(compiler.builds(each, sources), each.shared_object) for each in _wanted())


def copy_library(library: Path, to: Path) -> bool:
    """Puts a copy in place of what is there: a process that has the old library loaded keeps it."""
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        write_whole(to, library.read_bytes(), FOR_ALL)
    except OSError:
        return False
    return True


def _build_all(compiler: Compiler) -> int:
    wanted, sources, built = _wanted(), sources_digest(), list[str]()
    # An old compiler may not know the best: then the next best is as much as can be had.
    for each in dict.fromkeys((*wanted, *usable())):
        if built and each not in wanted:
            break
        if error := _build(compiler, each, sources):
            print(f"no CPU kernels for {each.name}: {error}", file=sys.stderr)
        else:
            built.append(each.name)
    if not built:
        print("Baton runs without its CPU kernels", file=sys.stderr)
        return 1
    print(f"CPU kernels for {', '.join(built)} by {shlex.join(compiler.command)}")
    return 0


def _build(compiler: Compiler, wanted: InstructionSet, sources: str) -> str:
    """Builds one library, which says of which sources it is; returns why it could not, or an empty text."""
    kept = compiler.builds(wanted, sources)
    if kept.exists() and copy_library(kept, wanted.shared_object):
        return ""
    with tempfile.TemporaryDirectory(prefix="building-", dir=wanted.shared_object.parent) as folder:
        origin = Path(folder, "origin.c")
        origin.write_text(f'const char {SOURCES_SYMBOL}[] = "{sources}";\n')
        parts = (*_PARTS, (str(origin), ()))
        objects = {Path(folder, f"{number}.o"): part for number, part in enumerate(parts)}
        library = Path(folder, wanted.shared_object.name)
        compilations = [
            [*_COMPILE, *flags, *wanted.compiler_flags, "-c", str(_FOLDER / source), "-o", str(compiled)]
            for compiled, (source, flags) in objects.items()
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            error = next(filter(None, pool.map(compiler.run, compilations)), "")
        if error or (error := compiler.run(["-shared", *map(str, objects), "-o", str(library)])):
            return error
        copy_library(library, kept)  # not to have it there costs time, no more
        os.replace(library, wanted.shared_object)
    return ""


if __name__ == "__main__":
    sys.exit(main())
