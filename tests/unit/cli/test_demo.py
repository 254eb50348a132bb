"""Tests what `make demo` says when its cluster does not become ready, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from scripts import demo
from tests.support import ROOT
from tests.support.processes import BATON, PYTHON_PATH

pytestmark = pytest.mark.process

_LONG_S = 60.0


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


def test_what_was_seen_is_said_in_five_lines_of_the_requests_own_figures() -> None:
    trace = [*BATON, "trace", str(ROOT / "docs" / "images" / "trace.jsonl"), "--request", "long-document", "--json"]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    facts = json.loads(subprocess.run(trace, env=environment, stdout=subprocess.PIPE, check=True).stdout)
    lines = demo.told(facts)
    assert len(lines) <= 5
    assert max(map(len, lines)) <= 110
    text = "\n".join(lines)
    for words in (
        "prefill-0 computed its 1782 tokens; first word after 4.28 s",
        "(the KV cache, 39.0 MiB) went to decode-0 through shared memory",
        "3059 ms of that beside the computing, 13.2 ms were waited for",
        "decode-0 wrote the other 63 tokens in 3.1 s",
        "baton trace demo-trace.jsonl --open",
        "baton up",
    ):
        assert words in text
    facts["transfer"]["transport"] = "nixl"
    assert "went to decode-0 by nixl" in "\n".join(demo.told(facts))


@contextlib.contextmanager
def demo_over(cluster: str, tmp_path: pathlib.Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yields a demo whose cluster is this program, and the process that the program says it is."""
    code = (
        "import pathlib, sys; from scripts import demo; "
        f"demo.BATON = (sys.executable, '-c', {cluster!r}); "
        f"demo.LOG_FILE = demo.TRACE_FILE = pathlib.Path({str(tmp_path / 'file')!r}); sys.exit(demo.main())"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, next(int(words[1]) for words in map(str.split, process.stdout) if words[:1] == ["pid"])


def test_a_demo_that_is_told_to_stop_takes_its_cluster_along(tmp_path: pathlib.Path) -> None:
    """A time limit, as CI has it, sends SIGTERM."""
    program = f"import os, time; print('pid', os.getpid(), flush=True); time.sleep({_LONG_S})"
    with demo_over(program, tmp_path) as (process, child):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert not psutil.pid_exists(child)


def test_a_demo_that_is_killed_takes_its_cluster_along(tmp_path: pathlib.Path) -> None:
    """Nothing of it can end the cluster any more: the cluster sees the end of a pipe."""
    cluster = "import sys; from services.core.lifecycle import Lifecycle; "
    cluster += "Lifecycle(lifeline_fd=int(sys.argv[-1]), orphan_grace_s=0).watch_lifeline(); "
    cluster += f"import os, time; print('pid', os.getpid(), flush=True); time.sleep({_LONG_S})"
    with demo_over(cluster, tmp_path) as (process, child):
        process.kill()
        psutil.wait_procs([psutil.Process(child)], timeout=30)
    assert not psutil.pid_exists(child)
