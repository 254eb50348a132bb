"""Tests of how a failed test is tried by itself (`tests/again.py`), with suites of a few lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import again

ROOT = Path(__file__).parents[3]
INI = "[pytest]\naddopts = -p no:cacheprovider -m 'not never'\nmarkers =\n  faults: x\n  hypothesis: x\n  never: x\n"
BESIDE_OTHERS = "assert 'PYTEST_XDIST_WORKER' not in os.environ"
SECOND_TIME_ALONE = (
    "assert 'PYTEST_XDIST_WORKER' not in os.environ; seen = os.path.exists('x'); open('x', 'w'); assert not seen"
)


def _run(folder: Path, tests: str) -> tuple[int, str]:
    """Returns the exit status and output of a suite of the given tests, in two processes."""
    (folder / "pytest.ini").write_text(INI)
    (folder / "test_it.py").write_text(f"import os, sys, pytest\n\n{tests}\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "tests.again", "-n", "2", "-q"]
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def _tests(body: str, count: int = 1, mark: str = "") -> str:
    return "\n".join(f"{mark}\ndef test_{number}(): {body}" for number in range(count))


def test_one_that_passes_alone_is_named_and_not_held_against_the_run(tmp_path: Path) -> None:
    status, said = _run(tmp_path, _tests(BESIDE_OTHERS))
    assert status == 0, said
    assert said.count("tried by themselves") == again.TIMES
    assert "passed 3 times" in said
    assert "test_it.py::test_0" in said.rsplit("passed 3 times", 1)[1]


def test_nothing_is_tried_again_where_all_pass(tmp_path: Path) -> None:
    status, said = _run(tmp_path, _tests("pass"))
    assert status == 0
    assert "tried by themselves" not in said


@pytest.mark.parametrize(
    ("tests", "tries"),
    [
        pytest.param(_tests("assert False"), 1, id="fails alone"),
        pytest.param(_tests(SECOND_TIME_ALONE), 2, id="fails one time of three"),
        pytest.param(_tests(BESIDE_OTHERS, again.MOST + 1), 0, id="too many"),
        pytest.param(_tests(BESIDE_OTHERS, mark="@pytest.mark.faults"), 0, id="of faults"),
        pytest.param(_tests(BESIDE_OTHERS, mark="@pytest.mark.hypothesis"), 0, id="of chance"),
        pytest.param(_tests("'PYTEST_XDIST_WORKER' in os.environ and os._exit(7)"), 0, id="its process died"),
        pytest.param("import nothing_of_this_name", 0, id="cannot be read"),
    ],
)
def test_what_fails_for_good(tmp_path: Path, tests: str, tries: int) -> None:
    status, said = _run(tmp_path, tests)
    assert status != 0, said
    assert said.count("tried by themselves") == tries
