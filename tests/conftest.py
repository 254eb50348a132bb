"""Defines how the suite runs: which tier a test is in, what is the same in every run, and what pytest says at the end.

`make test` gates a landing, so nothing in it measures the machine: tests of its folders that start no process, assert
no time or memory, take seconds and need no model from elsewhere, and then the smokes. `make proof` has what asserts
time or memory (`clock`) and what takes hours (`proof`), `make test-all` everything else.
"""

from __future__ import annotations

import itertools
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import hypothesis
import pytest

from services.engine.cpu.openmp import expect_shared_cores
from tests.support.examples import has_all_examples, num_examples
from tests.support.footprint import children_left

expect_shared_cores()  # before anything loads torch: tests run side by side, and their workers with them

# How long an example takes says how busy the machine is; what must be fast is measured on purpose. In `make test` the
# examples are always the same ones.
hypothesis.settings.register_profile(
    "baton",
    deadline=None,
    max_examples=num_examples(100),
    derandomize=not has_all_examples(),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("baton")

GATE_FOLDERS = ("unit", "contract", "sim", "deploy")
NOT_IN_GATE = {"process", "clock", "long", "default_model", "proof", "gpu"}
FOLDERS = {
    "smoke": ("smoke", "process"),
    "integration/faults": ("faults", "process"),
    "browser": ("process",),
    "clients": ("process",),
    "vllm": ("process", "long"),
}
"""Marks of all tests in a folder."""
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")
"""Audit events of the interpreter."""
_LISTS_FONTS = "fc-list"
"""What matplotlib starts where it is new: once on a machine, in whatever test draws first."""

_HERE = Path(__file__).parent
_started: list[str] = []
_A_DOT_IN = 4
_passed = itertools.count()


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTS and arguments[0] != _LISTS_FONTS:
        _started.append(f"{event} {arguments[:2]}"[:200])


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what runs in the background with interrupts ignored, and so would each process that a test starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    platform.processor()  # Python asks `uname` once a process; libraries ask Python, whichever test comes first
    sys.addaudithook(_note)
    # Else grpc.aio ends with the last server or channel, whenever that is collected, and waits for its thread, which
    # waits for whatever a closed loop has left: a test that has nothing to do with it would stand still.
    grpc.aio.init_grpc_aio()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(_HERE)
        for folder, marks in FOLDERS.items():
            if path.is_relative_to(folder):
                for name in marks:
                    item.add_marker(name)
        if path.parts[0] in GATE_FOLDERS and not NOT_IN_GATE & {mark.name for mark in item.iter_markers()}:
            item.add_marker("gate")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _started.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Holds the tests of the gate and their fixtures to their marks: a process that is started costs seconds on a busy
    machine. What `multiprocessing` starts is not seen: it tells nobody."""
    yield
    if _started and item.get_closest_marker("gate"):
        pytest.fail(f"it starts a process, so it is to be marked `process`: {_started}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Looks, after the last test of a folder, for what its tests have left running: a failure of none of them."""
    yield
    folder = item.path.parent
    if (nextitem is None or nextitem.path.parent != folder) and (left := children_left()):
        one_of_several = hasattr(item.config, "workerinput")  # pytest -n takes reports of its tests alone
        name = item.nodeid if one_of_several else f"{folder.relative_to(_HERE.parent)}::nothing is left running"
        item.ihook.pytest_runtest_logreport(
            report=pytest.TestReport(name, item.location, {}, "failed", f"still running: {left}", "call")
        )


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    """Prints a dot for every fourth test that passes: a green run of thousands fits on a screen."""
    if not report.passed or report.when != "call" or hasattr(report, "wasxfail") or not next(_passed) % _A_DOT_IN:
        return None
    return "passed", "", "PASSED"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints why tests were skipped, how many, and one of them."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section("skipped", sep="-")
    reasons: dict[str, list[str]] = {}
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons.setdefault(reason.removeprefix("Skipped: "), []).append(report.nodeid)
    for reason, names in sorted(reasons.items()):
        terminalreporter.write_line(f"{reason}: {len(names)}, as {names[0]}")
