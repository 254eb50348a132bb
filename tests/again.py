"""Runs pytest, and tries by themselves the few tests that failed.

Thousands of tests share the cores of a small machine, which others may use too: one of them may have to wait for longer
than it can. Whether that was all shows when it runs alone. It must pass three times running, it is named at the end,
and it is a defect of the test or of what it tests until somebody has looked. What must never happen is not tried again:
nothing that was found by chance, by killing processes or by simulation is excused by its being rare.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

MOST = 3
"""More failed tests than these have a cause in common."""
TIMES = 3
NEVER_AGAIN = frozenset({"hypothesis", "faults", "faults_long"})
"""Marks of tests that fail for good."""
NEVER_AGAIN_UNDER = ("tests/sim/", "tests/integration/answers/")
"""Tests of the protocol under faults, and of the answers' tokens."""
LIMIT_S = 900
"""The longest that such a run may take."""
_PHASES = ("setup", "call", "teardown")


class Failed:
    """Collects the failed tests of a run, as a plugin of pytest."""

    def __init__(self) -> None:
        self.once: list[str] = []
        """Failed tests that may be tried again."""
        self.for_good: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed or report.nodeid in (*self.once, *self.for_good):
            return
        died = report.when not in _PHASES  # the process that ran it
        never = died or NEVER_AGAIN & set(report.keywords) or report.nodeid.startswith(NEVER_AGAIN_UNDER)
        (self.for_good if never else self.once).append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.for_good.append(report.nodeid)


def main(arguments: Sequence[str]) -> int:
    """Returns pytest's exit status: 0 also if the tests that failed passed afterwards, each time, by themselves."""
    failed = Failed()
    status = int(pytest.main(list(arguments), plugins=[failed]))
    if status != pytest.ExitCode.TESTS_FAILED or failed.for_good or not 0 < len(failed.once) <= MOST:
        return status
    names = "\n".join(f"  {name}" for name in failed.once)
    for time in range(1, TIMES + 1):
        print(f"\n== failed; tried by themselves ({time} of {TIMES}):\n{names}", flush=True)
        if not _pass(failed.once):
            return status
    print(f"\n== failed once, then passed {TIMES} times by themselves; it is shown above why:\n{names}", flush=True)
    return 0


def _pass(names: Sequence[str]) -> bool:
    """Returns whether all of the tests pass in a process of their own."""
    here = {name: value for name, value in os.environ.items() if name != "BATON_TEST_UNTIL_S"}
    command = [sys.executable, "-m", "pytest", "-m", "", *names]
    try:
        return subprocess.run(command, env=here, timeout=LIMIT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
