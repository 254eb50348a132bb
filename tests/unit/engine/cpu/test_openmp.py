"""Tests how eagerly threads wait: what was said first holds, and a user's own settings hold above all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from services.engine.cpu import openmp

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)


def test_own_cores_are_waited_on_longer() -> None:
    openmp.expect_own_cores()
    own = os.environ.pop("GOMP_SPINCOUNT")
    openmp.expect_shared_cores()
    assert int(own) > int(os.environ["GOMP_SPINCOUNT"])


def test_the_first_word_holds() -> None:
    openmp.expect_own_cores()
    own = os.environ["GOMP_SPINCOUNT"]
    openmp.expect_shared_cores()
    assert os.environ["GOMP_SPINCOUNT"] == own


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_users_choose_for_themselves(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "user's")
    openmp.expect_own_cores()
    assert os.environ[name] == "user's"
    assert ("GOMP_SPINCOUNT" in os.environ) == (name == "GOMP_SPINCOUNT")


def answer_of(program: str) -> list[str]:
    """Returns what a new process prints whose user has chosen nothing."""
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.split()


def test_importing_the_engine_changes_no_environment_variable() -> None:
    """The import of what sets them is tried too, and nothing is called."""
    modules = ", ".join(f"services.engine.{name}" for name in ("engine", "worker_engine", "warm_up", "cpu.openmp"))
    program = f"import os; before = dict(os.environ); import {modules}; print(os.environ == before)"
    assert answer_of(program) == ["True"]


@pytest.mark.parametrize(("flags", "spins"), [([], "500"), (["--own-cores"], "5000")])
@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_a_worker_s_process_has_its_setting_before_torch_is_loaded(role: str, flags: list[str], spins: str) -> None:
    program = f"""
import os, sys
from services.cli import service
service._run_worker = lambda *_: print("torch" in sys.modules, os.environ["GOMP_SPINCOUNT"])
service.main({flags}, "baton {role}")
"""
    assert answer_of(program) == ["False", spins]
