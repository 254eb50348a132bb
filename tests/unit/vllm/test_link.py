"""Tests that a process of vLLM ends when its worker is gone, also one that is told and tells nothing."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from services.vllm import messages
from services.vllm.inside import link
from tests.support.patience import HANG_S


def test_a_beat_that_nobody_takes_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def end() -> None:
        ended.set()
        threading.Event().wait()  # nothing comes after it

    monkeypatch.setattr(link, "_end", end)
    monkeypatch.setattr(link, "die_with_parent", lambda: None)
    monkeypatch.setattr(os, "getppid", lambda: 2)
    monkeypatch.setattr(messages, "BEAT_S", 0.001)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "worker"))
        listener.listen()
        rank = link.Link(str(tmp_path / "worker"), messages.RANK)
        worker, _ = listener.accept()
    assert not ended.is_set()
    worker.close()
    assert ended.wait(HANG_S)
    rank.socket.close()
