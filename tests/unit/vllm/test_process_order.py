"""Tests what a worker makes of what several processes of vLLM have told, by the time at which it was sent, and of their
silence."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.vllm import messages
from services.vllm.process import SILENT_S, STOPPED_S, EngineProcess


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProcess]:
    """Returns one whose processes are the test."""
    keeper = SimpleNamespace(pid=os.getpid(), stdin=io.BytesIO(), returncode=0)
    keeper.send_signal = keeper.wait = lambda argument: None
    keeper.poll = lambda: None
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **fields: keeper)
    process = EngineProcess(Path("python"), {}, {})
    yield process
    process.end()
    assert not os.path.exists(process.folder)


def tell(connection: socket.socket, name: str, at: float) -> None:
    connection.sendall(messages.encode({"kind": messages.STEPPED, "name": name, "at": at}))


def names(process: EngineProcess) -> list[Any]:
    return [message["name"] for _, message in process._look()]


def test_a_cause_comes_before_its_effect_whoever_is_read_first(process: EngineProcess) -> None:
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        for connection in (first, second):
            connection.connect(f"{process.folder}/worker")
            assert names(process) == []
        tell(first, "effect", 2.0)
        tell(second, "cause", 1.0)
        tell(second, "next", 3.0)
        tell(first, "sent while it looked", time.monotonic() + 1e6)
        assert names(process) == ["cause", "effect", "next"]
        assert names(process) == [], "what may have a cause that was not read waits"


@pytest.mark.parametrize(
    ("is_stopped", "silent_s", "why"),
    [
        (True, 0.5 * STOPPED_S, ""),
        (True, 1.1 * STOPPED_S, "it was stopped"),
        (False, 0.9 * SILENT_S, ""),
        (False, 1.1 * SILENT_S, "nothing was heard of it for 3 s"),
    ],
)
def test_one_that_is_stopped_is_given_up_sooner_than_one_that_is_silent(
    process: EngineProcess, monkeypatch: pytest.MonkeyPatch, is_stopped: bool, silent_s: float, why: str
) -> None:
    monkeypatch.setattr("services.vllm.process._is_stopped", lambda pid: is_stopped and pid == 7)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{process.folder}/worker")
        process._look()
        connection.sendall(messages.encode({"kind": messages.HELLO, "who": messages.CORE, "rank": 0, "pid": 7}))
        process._look()
        process.loaded()
        assert process._what_is_wrong() == ""
        process.peers[0].heard_s -= silent_s
        assert process._what_is_wrong() == (why and f"vLLM's scheduler (pid 7) stands still: {why}")
