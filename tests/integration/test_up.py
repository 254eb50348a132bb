"""`baton up` with real services over a tiny model: it serves, survives `kill -9` of any child, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.models import tiny_model

ROOT = pathlib.Path(__file__).parents[2]
BATON = (sys.executable, "-m", "services.cli.main")
WAIT_S = 60.0
CHILDREN = {"router", "prefill-0", "decode-0"}


class Up:
    """`baton up` as a process, with the lines it has printed."""

    def __init__(self, model: pathlib.Path, folder: pathlib.Path) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        self.environ = {**clean, "PYTHONPATH": f"{ROOT}:{ROOT / 'gen'}"}
        flags = ["--port", "0", "--dtype", "float32", "--kv-blocks", "64", "--trace-file", str(folder / "trace.jsonl")]
        self.log = folder / "log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*BATON, "up", "--model", str(model), *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environ,
            )
        self.lines: list[str] = []

    def read_until(self, pattern: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return self.lines[-1]
        raise AssertionError(f"no {pattern!r} in {self.lines}; its log: {self.log.read_text()[-3000:]}")

    def children(self) -> dict[str, tuple[int, list[int]]]:
        """Newest pid of each child, and its ports."""
        found = {}
        for line in self.lines:
            if match := re.match(r"(\S+) +\S+:(\d+) +metrics \S+:(\d+)/metrics +pid (\d+)", line):
                found[match[1]] = (int(match[4]), [int(match[2]), int(match[3])])
        return found

    def baton(self, command: str, *flags: str) -> subprocess.CompletedProcess[str]:
        target = f"127.0.0.1:{self.children()['router'][1][0]}"
        return subprocess.run(
            [*BATON, command, "--target", target, *flags],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )

    def generate(self) -> dict[str, object]:
        process = self.baton("generate", "--prompt", "The baton is passed", "--max-tokens", "4", "--json")
        assert process.returncode == 0, process.stderr
        answer: dict[str, object] = json.loads(process.stdout)
        return answer


@pytest.fixture
def up(tmp_path: pathlib.Path) -> Iterator[Up]:
    running = Up(tiny_model("llama", tmp_path), tmp_path)
    try:
        yield running
    finally:
        pids = [pid for pid, _ in running.children().values()]
        running.process.kill()
        running.process.wait()
        assert running.process.stdout is not None
        running.process.stdout.close()
        await_gone(pids)


def await_gone(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                assert select.select([fd], [], [], WAIT_S)[0], f"process {pid} is left behind"
            finally:
                os.close(fd)


def unix_sockets(pids: list[int]) -> set[str]:
    """Names of the Unix sockets these processes listen on."""
    return {
        str(connection.laddr)
        for pid in pids
        for connection in psutil.Process(pid).net_connections(kind="unix")
        if connection.laddr
    }


def assert_nothing_left(children: dict[str, tuple[int, list[int]]], sockets: set[str]) -> None:
    await_gone([pid for pid, _ in children.values()])
    for _, ports in children.values():
        for port in ports:
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} is still open"
    names = pathlib.Path("/proc/net/unix").read_text()
    assert not [name for name in sockets if name in names]
    assert not list(pathlib.Path("/dev/shm").glob("*baton*"))


def test_serves_and_drains(up: Up, tmp_path: pathlib.Path) -> None:
    up.read_until("^ready$")
    answer = up.generate()  # exactly then, and not a moment later
    assert len(answer["token_ids"]) == 4
    assert answer["workers"] == {"prefill": "prefill-0", "decode": "decode-0", "retries": 0}
    status = json.loads(up.baton("status", "--json").stdout)
    assert {worker["worker"]["worker_id"]: worker["state"] for worker in status["workers"]} == {
        "prefill-0": "ready",
        "decode-0": "ready",
    }
    health = up.baton("health", "--service", "baton.v1.InferenceService")
    assert (health.returncode, health.stdout) == (0, "SERVING\n")
    children = up.children()
    sockets = unix_sockets([pid for pid, _ in children.values()])
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(WAIT_S) == 0
    assert_nothing_left(children, sockets)
    trace = subprocess.run(
        [*BATON, "trace", str(tmp_path / "trace.jsonl"), "--request", str(answer["request_id"])],
        env=up.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "KV moved" in trace.stdout


def test_any_child_may_be_killed_and_at_last_the_supervisor(up: Up) -> None:
    up.read_until("^ready$")
    for name in sorted(CHILDREN):
        pid, ports = up.children()[name]
        os.kill(pid, signal.SIGKILL)
        up.read_until(f"^{name} died")
        up.read_until(rf"^{name} .* pid")
        assert up.children()[name][0] != pid
        if name == "router":
            assert up.children()[name][1][0] == ports[0]
        assert len(up.generate()["token_ids"]) == 4
    children = up.children()
    assert set(children) == CHILDREN
    sockets = unix_sockets([pid for pid, _ in children.values()])
    up.process.kill()
    assert_nothing_left(children, sockets)
