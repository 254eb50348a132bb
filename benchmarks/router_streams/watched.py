"""Measures what it costs the router to be looked at: viewers of the console, beside streams of many workers.

The router's processor time is measured in turns without and with viewers, of the same router under the same streams, so
that what else the machine does falls on both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figure import Figure, Findings
from benchmarks.router_streams.measure import RouterProcess, client_of, cpu_s, router_process, until, workers_process
from benchmarks.settings import setting

_MOST_TOKENS = 4_000


@dataclasses.dataclass(frozen=True)
class WatchSettings:
    console_workers: int = setting(64, "workers, half of them for prompts")
    console_viewers: int = setting(5, "viewers of the console")
    console_streams: int = setting(200, "streams beside them")
    console_window_s: float = setting(10.0, "seconds of each measurement")


def measure(model: str, path: str, repeats: int, settings: WatchSettings) -> Findings:
    """Returns the shares of a core, and what a viewer is sent. `path` is the model's folder."""
    half = settings.console_workers // 2
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        router = stack.enter_context(router_process(path, folder))
        stack.enter_context(
            workers_process(model, path, [router], folder, num_prefill=half, num_decode=half, step_ms=500.0)
        )
        client = stack.enter_context(client_of("http", [router], (32, 32), _MOST_TOKENS, folder))
        client.open(settings.console_streams)
        until(router.all_proven, "all pairs are proven", 300.0)  # their canaries would fall on whatever comes first
        alone, watched, sent = [], [], []
        for _ in range(repeats):
            alone.append(_share(router, settings.console_window_s))
            with _viewers(router.ports["http"], settings.console_viewers) as counts:
                time.sleep(2.0)  # everything was told at first
                before = list(counts)
                watched.append(_share(router, settings.console_window_s))
                each = (now - then for now, then in zip(counts, before, strict=True))
                sent.append(max(each) / settings.console_window_s / 1024)
        client.check()
        what = f"{settings.console_workers} workers, {settings.console_streams} streams"
        added = tuple(100 * (then - now) for now, then in zip(alone, watched, strict=True))
        return [
            Figure(f"{what}: router CPU", "% of a core", tuple(100 * each for each in alone), ""),
            Figure(f"{what}: {settings.console_viewers} viewers add", "% of a core", added, "<= 2"),
            Figure(f"{what}: a viewer is sent", "KB/s", tuple(sent), ""),
        ]


def _share(router: RouterProcess, seconds: float) -> float:
    """Returns the processor time that the router takes, as a share of the time that passes."""
    began_s, used_s = time.monotonic(), cpu_s(router)
    time.sleep(seconds)
    return (cpu_s(router) - used_s) / (time.monotonic() - began_s)


@contextlib.contextmanager
def _viewers(port: int, number: int) -> Iterator[list[int]]:
    """Yields the bytes that each viewer has been sent so far. Raises RuntimeError if one is sent nothing."""
    counts = [0] * number
    over = threading.Event()

    def look(index: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
        connection.request("GET", "/console/events")
        answer = connection.getresponse()
        while not over.is_set() and (part := answer.read1(1 << 16)):
            counts[index] += len(part)
        connection.close()

    threads = [threading.Thread(target=look, args=(index,), daemon=True) for index in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield counts
        if not all(counts):
            raise RuntimeError(f"a viewer was sent nothing: {counts}")
    finally:
        over.set()
        for thread in threads:
            thread.join(timeout=10.0)
