"""Tests what `make install` and `make vllm` do with Pythons, which are scripts: nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.process

OLD = "#!/bin/sh\nexit 3\n"
NEW = '#!/bin/sh\ntest "$1" = -c || echo "runs $*"\n'
NEEDED = ("pyproject.toml", "client/pyproject.toml", "requirements/constraints.txt", "requirements/vllm.txt")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("make is not on this machine")
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in NEEDED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def install(tree: Path, python: Path, target: str = "install") -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", target, f"PYTHON={python}"]
    environment = {name: value for name, value in os.environ.items() if name != "BATON_KERNELS"}  # make's, for tests
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def refused(tree: Path, python: Path) -> str:
    """Returns the one line that make's own follows."""
    result = install(tree, python)
    assert result.returncode != 0
    assert result.stdout == ""
    line, *makes = result.stderr.splitlines()
    assert len(makes) == 1, result.stderr
    return line


def test_a_python_that_is_too_old(tree: Path) -> None:
    old = script(tree / "old", OLD)
    assert refused(tree, old).startswith(f"Baton needs Python 3.11 or newer, and {old} is older. Try: make install PY")


def test_a_python_that_does_not_exist_is_not_called_old(tree: Path) -> None:
    missing = tree / "python9"
    assert f"there is no {missing} that runs. Try: make install PYTHON=" in refused(tree, missing)


def test_an_environment_of_an_old_python_is_told_with_what_to_do(tree: Path) -> None:
    script(tree / ".venv/bin/python", OLD)
    said = refused(tree, script(tree / "new", NEW))
    assert said == ".venv was made by a Python older than 3.11. Remove it, and it is made anew: rm -r .venv"


def test_an_environment_whose_python_is_gone(tree: Path) -> None:
    (tree / ".venv/bin").mkdir(parents=True)
    (tree / ".venv/bin/python").symlink_to(tree / "uninstalled")
    assert "has a Python that does not run" in refused(tree, script(tree / "new", NEW))


def test_an_environment_of_a_new_python_is_used(tree: Path) -> None:
    script(tree / ".venv/bin/python", NEW)
    script(tree / ".venv/bin/pip", NEW)
    result = install(tree, script(tree / "new", NEW))
    assert result.returncode == 0, result.stderr
    assert "pip install " in result.stdout
    assert ".[worker]" in result.stdout
    assert ".[dev]" not in result.stdout, "who tries it out needs no tests"
    assert (tree / ".venv/.installed").exists()


@pytest.mark.parametrize(("target", "which"), [("install", ""), ("test", "processor"), ("bench", "processor")])
def test_kernels_for_plainer_processors_are_built_for_tests_and_benchmarks(tree: Path, target: str, which: str) -> None:
    """Whoever tries it out waits for those that are used."""
    script(tree / ".venv/bin/python", '#!/bin/sh\necho "$BATON_KERNELS: $*"\n')
    script(tree / ".venv/bin/pip", NEW)
    result = install(tree, script(tree / "new", NEW), target)
    assert result.returncode == 0, result.stderr
    (build,) = (line for line in result.stdout.splitlines() if "native.build" in line)
    assert build.startswith(f"{which}: scripts/patiently.py .venv/bin/python -m services.engine.native.build")


def test_vllm_is_installed_in_an_environment_of_its_own(tree: Path) -> None:
    made = script(tree / "out/vllm-venv/bin/python", NEW)
    script(tree / "out/vllm-venv/bin/pip", NEW)
    result = install(tree, made, "vllm")
    assert result.returncode == 0, result.stderr
    steps = [line.removeprefix("runs -m pip ") for line in result.stdout.splitlines() if line.startswith("runs")]
    assert [step.split()[0] for step in steps] == ["install", "uninstall"]
    assert (tree / "out/vllm-venv/.installed").exists()


@pytest.mark.parametrize("fails", ["*install*", "*uninstall*", "*import*"])
def test_an_environment_for_vllm_that_cannot_be_made_ends_make(tree: Path, fails: str) -> None:
    made = script(tree / "out/vllm-venv/bin/python", f'#!/bin/sh\ncase "$*" in {fails}) exit 9 ;; esac\n')
    script(tree / "out/vllm-venv/bin/pip", NEW)
    assert install(tree, made, "vllm").returncode != 0
    assert not (tree / "out/vllm-venv/.installed").exists(), "it is made anew the next time"
