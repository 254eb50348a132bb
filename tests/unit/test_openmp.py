"""How eagerly threads wait: what was said first holds, and a user's own settings hold above all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from services.core import openmp


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


def test_it_is_set_before_torch_is_loaded() -> None:
    program = "import services.engine, sys, os; print('torch' in sys.modules, os.environ['GOMP_SPINCOUNT'])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "500"]
