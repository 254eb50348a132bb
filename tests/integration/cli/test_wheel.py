"""Tests what `make wheel` builds as whoever has no compiler meets it: installed into an environment of its own, with
nothing else on the path. Its dependencies are those of the Python that runs the tests, whose Baton it does not see."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from services.engine.native.instruction_sets import instruction_sets, usable
from tests.support import ROOT
from tests.support.processes import environment

pytestmark = [pytest.mark.timeout(1800), pytest.mark.process, pytest.mark.long]

KERNELS = """
import shutil
from services.engine.native import bindings
assert not any(map(shutil.which, ("gcc", "cc", "clang"))), "there is a compiler"
print(bindings.__file__, bindings.kernels().name)
"""
ANSWER = """
from services.cli.main import main
from services.cli.run import cluster
from services.core.process_config import DEFAULT_MODEL

with cluster(DEFAULT_MODEL, stay=False) as (up, target):
    status = main(["generate", "--prompt", "Name a colour.", "--max-tokens", "8", "--target", target])
assert status == 0
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns each wheel under the name of its distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    ran(Path(sys.executable), str(ROOT / "scripts" / "wheels.py"), str(folder), env=settings(folder))
    return {wheel.name.partition("-")[0]: wheel for wheel in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def bare(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python of an environment into which the wheels alone were installed."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = ("-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check")
    ran(Path(sys.executable), *pip, "--no-deps", "--no-index", *map(str, wheels.values()), env=dict(os.environ))
    (packages,) = (folder / "lib").glob("python*/site-packages")
    # What is in a folder that is named so is found, but no .pth file in there is read: they name this tree.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def ran(python: Path, *arguments: str, env: dict[str, str], cwd: Path | None = None) -> str:
    """Returns what a process of Python's printed; neither it nor what it starts may warn of anything about kernels."""
    result = subprocess.run([str(python), *arguments], env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "CPU kernels" not in result.stderr, result.stderr
    return result.stdout


def settings(temp: Path) -> dict[str, str]:
    """Returns the environment of a test's processes, with the caller's models and what was compiled before."""
    return environment(temp) | {name: os.environ[name] for name in ("BATON_HOME",) if name in os.environ}


def alone(python: Path, temp: Path) -> dict[str, str]:
    """Returns the environment of whoever has installed the wheel and has no compiler."""
    kept = {name: value for name, value in settings(temp).items() if name not in ("PYTHONPATH", "CC")}
    return kept | {"PATH": str(python.parent)}


def test_it_holds_the_kernels_of_all_instruction_sets_and_all_that_is_tracked(wheels: dict[str, Path]) -> None:
    assert wheels["baton_serving"].stem.endswith(f"-py3-none-manylinux_2_28_{platform.machine()}")
    assert wheels["baton_client"].stem.endswith("-py3-none-any")
    held = {name for wheel in wheels.values() for name in zipfile.ZipFile(wheel).namelist()}
    assert {f"services/engine/native/{each.shared_object.name}" for each in instruction_sets()} <= held
    tracked = subprocess.run(
        ["git", "ls-files", "services", "gen"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    assert {name.removeprefix("gen/") for name in tracked} <= held


def test_its_kernels_do_not_say_where_they_were_compiled(wheels: dict[str, Path]) -> None:
    wheel = zipfile.ZipFile(wheels["baton_serving"])
    for each in instruction_sets():
        assert b"services/engine" not in wheel.read(f"services/engine/native/{each.shared_object.name}")


def test_its_kernels_load_without_a_compiler(bare: Path, tmp_path: Path) -> None:
    module, name = ran(bare, "-c", KERNELS, env=alone(bare, tmp_path), cwd=tmp_path).split()
    assert Path(module).is_relative_to(bare.parents[1])
    assert name == usable()[0].name


@pytest.mark.default_model
def test_it_answers_with_the_default_model(bare: Path, tmp_path: Path) -> None:
    assert ran(bare, "-c", ANSWER, env=alone(bare, tmp_path), cwd=tmp_path).strip()
