"""Tests that what several processes of vLLM have told is taken in by the time at which it was sent."""

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
from services.vllm.process import EngineProcess


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProcess]:
    """Returns one whose processes are the test."""
    keeper = SimpleNamespace(pid=os.getpid(), stdin=io.BytesIO(), returncode=0)
    keeper.send_signal = keeper.wait = lambda argument: None
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
