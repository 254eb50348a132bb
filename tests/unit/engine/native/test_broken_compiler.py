"""Tests the build of the kernels with what is no use: a compiler that compiles nothing, and an end by Ctrl-C."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.patience import Patience

pytestmark = pytest.mark.process

BUILD = (sys.executable, "-m", "services.engine.native.build")
FETCH = "--fetch-compiler"
WITHOUT_HEADERS = """#!/bin/sh
echo "trial.c:2:10: fatal error: stdint.h: No such file or directory" >&2
echo "compilation terminated." >&2
exit 1
"""
# Stands for pip: it fills its folder for temporary files, says so, and waits for the end.
PIP = """
import pathlib, signal, sys, tempfile, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
pathlib.Path(tempfile.mkdtemp(), "wheel").write_bytes(bytes(1000))
if {fails}:
    sys.exit(1)
print("filled", flush=True)
time.sleep(600)
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Returns an environment without a compiler, with folders of the test's own for programs, packages and temporary
    files."""
    if importlib.util.find_spec("ziglang") is not None:
        pytest.skip("a compiler is installed beside Python")
    for name in ("bin", "packages", "temp"):
        (tmp_path / name).mkdir()
    path = os.pathsep.join(map(str, (tmp_path / "packages", ROOT)))
    home = str(tmp_path / "home")
    return {"PATH": str(tmp_path / "bin"), "PYTHONPATH": path, "TMPDIR": str(tmp_path / "temp"), "BATON_HOME": home}


def install_pip(folder: Path, *, fails: bool) -> None:
    package = folder / "packages" / "pip"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PIP.format(fails=fails))


def install_gcc(folder: Path) -> None:
    gcc = folder / "bin" / "gcc"
    gcc.write_text(WITHOUT_HEADERS)
    gcc.chmod(0o755)


def build(environ: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BUILD, *flags], env=environ, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_compiler_without_headers_is_told_once(environ: dict[str, str], tmp_path: Path) -> None:
    install_gcc(tmp_path)
    result = build(environ)
    assert result.returncode == 1
    assert result.stderr.count("stdint.h") == result.stderr.count("\n") == 1, result.stderr
    assert f"{tmp_path}/bin/gcc compiles nothing (trial.c:2:10: fatal error: stdint.h: No such" in result.stderr
    assert "runs without its CPU kernels" in result.stderr
    assert FETCH in result.stderr


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("false", "CC=false compiles nothing (it says nothing); unset CC"),
        ("false -O2", "CC=false -O2 compiles nothing (it says nothing); unset CC"),
        ('"', 'CC=" is no command (No closing quotation); unset CC'),
        ("no-program", "CC=no-program compiles nothing ("),
    ],
)
def test_one_that_was_named_is_told_once(environ: dict[str, str], tmp_path: Path, named: str, said: str) -> None:
    (tmp_path / "bin" / "false").symlink_to("/bin/false")
    (tmp_path / "bin" / "no-program").write_bytes(b"\x7fELF")
    (tmp_path / "bin" / "no-program").chmod(0o755)
    result = build(environ | {"CC": named})
    assert result.returncode == 1
    assert said in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("named", ["", "false", '"', "missing"])
def test_one_that_compiles_nothing_counts_as_none(environ: dict[str, str], tmp_path: Path, named: str) -> None:
    """It is not used again where another may be fetched, as the advice says."""
    (tmp_path / "bin" / "false").symlink_to("/bin/false")
    install_gcc(tmp_path)
    install_pip(tmp_path, fails=True)
    result = build(environ | ({"CC": named} if named else {}), FETCH)
    assert "fetching one" in result.stdout, result
    assert "there is none to be had" in result.stdout
    assert list((tmp_path / "temp").iterdir()) == []


def test_ctrl_c_leaves_nothing_and_prints_no_traceback(environ: dict[str, str], tmp_path: Path) -> None:
    install_pip(tmp_path, fails=False)
    command = [*BUILD, FETCH]
    with subprocess.Popen(
        command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        patience = Patience(60.0)
        while "filled" not in process.stdout.readline():
            assert not patience.is_over()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate(timeout=60.0)
    assert process.returncode == 130
    assert err == ""
    assert list((tmp_path / "temp").iterdir()) == []
