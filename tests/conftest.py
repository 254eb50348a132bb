"""Defines how the suite runs, and what pytest says at the end of every run: what did not run, by name and reason."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
import pytest

from services.engine.cpu.openmp import expect_shared_cores
from tests.support.examples import num_examples
from tests.support.footprint import children_left

expect_shared_cores()  # before anything loads torch: tests run side by side, and their workers with them

# How long an example takes says how busy the machine is; what must be fast is measured on purpose.
hypothesis.settings.register_profile(
    "baton", deadline=None, max_examples=num_examples(100), suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("baton")

_SAID = {"faults", "faults_long", "long"}
_left_out = pytest.StashKey[dict[str, list[str]]]()


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what runs in the background with interrupts ignored, and so would each process that a test starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_left_out] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """CI has an hour. On a machine that needs longer, what is left then is named instead of run."""
    until_s = os.environ.get("BATON_TEST_UNTIL_S")
    if until_s and time.time() > float(until_s):
        pytest.skip("no time was left for it (BATON_TEST_UNTIL_S)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Ends what the tests of one folder have started before those of the next begin, which may measure time."""
    yield
    if nextitem is None or nextitem.path.parent != item.path.parent:
        left = children_left()
        assert not left, f"still running after the last test of {item.path.parent.name}: {left}"


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        markers = sorted({mark.name for mark in item.iter_markers()} & _SAID)
        item.config.stash[_left_out][item.nodeid] = markers


def pytest_sessionfinish(session: pytest.Session) -> None:
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:  # one of several processes (pytest -n)
        output["left_out"] = session.config.stash[_left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Adds what one of the processes of `pytest -n` left out to what the run left out, when that process ends."""
    node.config.stash[_left_out] |= getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the skipped tests one by one, then what the chosen markers left out."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section("skipped", sep="-")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.write_line(f"{report.nodeid}: {reason.removeprefix('Skipped: ')}")
    if terminalreporter.config.option.keyword:
        return  # whoever asked for a few by name knows that
    left_out = {name: marks for name, marks in terminalreporter.config.stash[_left_out].items() if marks}
    if left_out:
        terminalreporter.section("left out by the markers chosen (-m)", sep="-")
    for name, markers in sorted(left_out.items()):
        terminalreporter.write_line(f"{name}: {', '.join(markers)}")
