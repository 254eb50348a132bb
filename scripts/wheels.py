"""Builds the wheels of baton-client and baton-serving into a folder. The latter holds the CPU kernels of every
instruction set of this architecture, so that whoever installs it needs no compiler.

Run as `python scripts/wheels.py FOLDER`. The kernels are compiled in a copy of the tree, by the compiler that
`services.engine.native.build` fetches, for an old glibc; that they demand no newer one, and no library but glibc's, is
checked (PEP 600). Owns: what the wheel's tag promises. Never: how a kernel is compiled.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from services.engine.native.build import OLDEST_GLIBC  # noqa: E402
from services.engine.native.instruction_sets import instruction_sets  # noqa: E402

TAG = f"py3-none-manylinux_{OLDEST_GLIBC.replace('.', '_')}_{platform.machine()}"
_LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0"}
"""What a library of kernels may ask the loader for; torch has loaded its OpenMP before."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the wheels of baton-client and baton-serving.")
    parser.add_argument("folder", type=Path, help="where they are written")
    folder = parser.parse_args().folder.resolve()
    with tempfile.TemporaryDirectory(prefix="baton-wheels-") as scratch:
        tree = Path(scratch)
        _copy_tracked(tree)
        _compile_kernels(tree)
        if problems := list(_problems(tree)):
            print("\n".join(problems), file=sys.stderr)
            return 1
        _build(tree / "client", folder, {})
        _build(tree, folder, {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true", "BATON_WHEEL_TAG": TAG})
    return 0


def _copy_tracked(tree: Path) -> None:
    """Copies what git tracks, as it is now: neither a stray file nor this machine's kernels get into a wheel."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)


def _compile_kernels(tree: Path) -> None:
    # Without a path no compiler of this machine is found: what they compile runs on glibcs like this machine's.
    environment = {**os.environ, "BATON_KERNELS": "all", "CC": "", "PATH": ""}
    command = [sys.executable, "-m", "services.engine.native.build", "--fetch-compiler"]
    subprocess.run(command, cwd=tree, env=environment, check=True)
    for library in tree.glob("services/engine/native/*.so"):
        library.chmod(0o644)  # whether it was linked now or kept from a build before: the wheel's digest is the same


def _problems(tree: Path) -> Iterator[str]:
    """Yields why the kernels in the tree do not run on every machine that the tag names."""
    for each in instruction_sets():
        library = tree / each.shared_object.relative_to(ROOT)
        if not library.exists():
            yield f"there are no kernels for {each.name}"
        elif why := why_not_portable(library.read_bytes()):
            yield f"{library.name} does not fit {TAG}: {why}"


def why_not_portable(library: bytes, oldest: str = OLDEST_GLIBC) -> str:
    """Returns which newer glibc or which other libraries the shared library asks for; an empty text if none."""
    demanded = {(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)}
    newest = max(demanded, default=(0, 0))
    libraries = {name.decode() for name in re.findall(rb"(?<=\0)[\w+.-]+\.so\.\d+(?=\0)", library)} - _LIBRARIES
    too_new = [f"glibc {newest[0]}.{newest[1]}"] if newest > tuple(map(int, oldest.split("."))) else []
    return ", ".join(too_new + sorted(libraries))


def _build(project: Path, folder: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=project, env={**os.environ, **environment}, check=True)


if __name__ == "__main__":
    sys.exit(main())
