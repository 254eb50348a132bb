"""Tests what `make demo` says when its cluster does not become ready."""

from __future__ import annotations

import pathlib
import sys

import pytest

from scripts import demo


def _wait(program: str, start_s: float, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    log = tmp_path / "demo.log"
    monkeypatch.setattr(demo, "BATON", (sys.executable, "-S", "-c", program))
    monkeypatch.setattr(demo, "LOG_FILE", log)
    with open(log, "w") as file:
        cluster = demo.Cluster(file.fileno())
    try:
        return cluster.wait_until_ready(start_s)
    finally:
        cluster.kill()


def test_a_cluster_that_ends_is_told_from_one_that_is_slow(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is told with the end of its log, the slow one with what to do."""
    with pytest.raises(demo.DemoFailed, match=r"ended with status 3\. .*\n.*no such port"):
        _wait("import sys; print('no such port', file=sys.stderr); sys.exit(3)", 60.0, tmp_path, monkeypatch)
    with pytest.raises(demo.DemoFailed, match=r"was not ready within 0\.2 s\. .* DEMO_ARGS='--start-s 0\.6'"):
        _wait("import time; time.sleep(60)", 0.2, tmp_path, monkeypatch)
