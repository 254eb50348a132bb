"""Tests the executor whose threads do not keep a process from ending."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import wait

import pytest

from services.core.daemon_threads import DaemonThreads

pytestmark = pytest.mark.process


def test_work_is_done_by_as_many_threads_as_are_needed() -> None:
    threads = DaemonThreads(2, "some")
    assert not threads._threads
    together = threading.Barrier(2)
    both = [threads.submit(together.wait, 20) for _ in range(2)]
    assert {each.result() for each in both} == {0, 1}
    names = {threads.submit(lambda: threading.current_thread().name).result() for _ in range(5)}
    assert names <= {"some_0", "some_1"}
    failed = threads.submit(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result()
    threads.shutdown()
    assert not any(thread.is_alive() for thread in threads._threads)
    with pytest.raises(RuntimeError):
        threads.submit(int)


@pytest.mark.parametrize("cancels", [False, True])
def test_what_waits_at_the_end_is_done_or_cancelled(cancels: bool) -> None:
    threads, go, begun = DaemonThreads(1, "one"), threading.Event(), threading.Event()
    first = threads.submit(lambda: (begun.set(), go.wait(20)))
    second = threads.submit(lambda: "second")
    assert begun.wait(20)
    threads.shutdown(wait=False, cancel_futures=cancels)
    assert not first.done()
    go.set()
    threads.shutdown(cancel_futures=cancels)
    wait([first], 20)
    assert second.cancelled() if cancels else second.result() == "second"


def test_work_that_never_returns_does_not_hold_up_the_end() -> None:
    code = (
        "import threading\nfrom services.core.daemon_threads import DaemonThreads\n"
        "threads = DaemonThreads(1, 'x')\nthreads.submit(threading.Event().wait)\nthreads.shutdown(wait=False)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
