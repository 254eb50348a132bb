"""Tests `baton top` and `baton slo` on a real cluster of a tiny model, and `baton top` as a process on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from textual.widgets import DataTable, Static

from services.cli.client import control
from services.cli.main import main
from services.cli.top_app import RequestScreen, TopApp
from services.cli.top_feed import RouterFeed
from tests.support.cluster import greedy_request, running_cluster
from tests.support.models import tiny_model
from tests.support.processes import PYTHON_PATH
from tests.support.scripted_control import ScriptedControl, serving, split_timeline
from tests.support.trusted import CLUSTER_TOKEN
from tests.support.workers import DECODE, PREFILL

pytestmark = pytest.mark.process

PROMPT = [5 + n % 300 for n in range(200)]
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("top"))


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", CLUSTER_TOKEN)


async def test_a_real_cluster_live_and_its_objectives(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running_cluster(model, [PREFILL, DECODE]) as cluster:
        target = cluster.router.control_address
        await cluster.stream(greedy_request(PROMPT, 20, request_id="before"))
        with contextlib.ExitStack() as connection:
            feed = RouterFeed(connection.enter_context(control(target, "")), target, 10.0)
            await asyncio.to_thread(feed.refresh)
            app = TopApp(feed, hang_up=connection.close)
            async with app.run_test(size=(160, 40)) as pilot:
                await watch(app, pilot, cluster)
        assert await asyncio.to_thread(main, ["top", "--target", target, "--once"]) == 0
        words = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert any(row[:3] == ["w0", "w1", "proven"] and row[4] == "2" for row in words)
        flags = ["--ttft-ms", "60000", "--tpot-ms", "60000", "--itl-ms", "60000", "--queue-ms", "60000"]
        flags += ["--e2e-ms", "0.001"]
        assert await asyncio.to_thread(main, ["slo", "--target", target, "--json", *flags]) == 0
        objectives = json.loads(capsys.readouterr().out)["objectives"]
        for name, num_met in (("ttft", 2), ("tpot", 2), ("itl", 2), ("queue", 2), ("e2e", 0)):
            found = objectives[name]["split"]
            assert (found["num_counted"], found["num_met"]) == (2, num_met)
            assert objectives[name]["unsplit"]["num_counted"] == 0
            assert found["p50_ms"] > 0


async def watch(app, pilot, cluster) -> None:
    def rows(table: str) -> list[list[str]]:
        widget = app.query_one(f"#{table}", DataTable)
        return [[cell.plain for cell in widget.get_row_at(row)] for row in range(widget.row_count)]

    async def until(condition, what: str) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                await pilot.pause(0.05)
        assert condition(), what

    assert [row[:3] for row in rows("workers")] == [["w0", "prefill", "ready"], ["w1", "decode", "ready"]]
    assert all(row[4].endswith("/128") for row in rows("workers"))
    assert rows("pairs")[0][:3] == ["w0", "w1", "proven"]
    (before,) = rows("requests")
    assert before[0] == "before"
    assert before[2:4] + before[5:6] == ["length", "200", "20"]
    assert all(float(before[number]) > 0 for number in (6, 7, 8, 9, 10))
    assert before[11:] == ["0", "w0 → w1"]
    await cluster.stream(greedy_request(PROMPT[:50], 5, request_id="while"))
    await until(lambda: [row[0] for row in rows("requests")] == ["while", "before"], "the new one is there")
    await pilot.press("enter")
    await until(lambda: isinstance(app.screen, RequestScreen), "it is open")

    def text() -> str:
        return str(app.screen.query_one("#request", Static).visual)

    await until(lambda: "prefill on w0" in text() and "decode on w1" in text(), "its placements are explained")
    # It may have been opened before the news of its end.
    parts = ("prefill.compute", "kv.transfer", "decode.run")
    await until(lambda: all(name in text() for name in parts), "what its workers measured is there")
    assert "first token after" in text()


async def test_on_a_terminal_q_leaves_it_as_it_was() -> None:
    service = ScriptedControl()
    service.set(split_timeline(1))
    async with serving(service) as target:
        for keys in (b"q", b"\x03"):
            status, screen = await asyncio.to_thread(run_on_terminal, target, keys)
            assert status == 0, screen[-2000:]
            assert b"req-1" in screen
            assert b"\x1b[?1049l" in screen[-400:], "the screen is given back"


def run_on_terminal(target: str, keys: bytes) -> tuple[int, bytes]:
    """Runs `baton top` on a terminal until it shows a request, types the keys, and returns its status and all that it
    wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli.main", "top", "--target", target],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, "TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    screen, typed, until_s = b"", False, time.monotonic() + WITHIN_S
    try:
        while time.monotonic() < until_s:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    chunk = os.read(ours, 65536)
                except OSError:  # the other end is closed
                    break
                if not chunk:
                    break
                screen += chunk
            if not typed and b"req-1" in screen:
                os.write(ours, keys)
                typed = True
        return process.wait(WITHIN_S), screen
    finally:
        process.kill()
        process.wait()
        os.close(ours)
