"""Ports for processes that are told theirs: free, and nobody else's by chance."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from benchmarks import ports


def test_they_differ_and_are_none_of_the_kernels() -> None:
    found = ports.free_ports(100)
    assert len(set(found)) == 100
    assert max(found) < ports.kernels_lowest()


def test_they_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        first, second, third = ports.free_ports(3)
        stack.enter_context(socket.create_server(("127.0.0.1", second)))
        monkeypatch.setattr(ports, "_LOWEST", second)
        monkeypatch.setattr(ports, "kernels_lowest", lambda: second + 1)
        with pytest.raises(OSError, match="fewer than 1"):
            ports.free_ports(1)
        for port in (first, third):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))


def test_where_the_kernel_does_not_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "none")
    assert ports.kernels_lowest() == 32_768
