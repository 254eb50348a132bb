"""`baton up` leaves nothing behind: no process, port, socket, shared memory or temporary file, whoever is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.footprint import holders, owned_memfds
from tests.support.models import tiny_model
from tests.support.processes import Up

pytestmark = [pytest.mark.process, pytest.mark.long]

CHILDREN = ("decode-0", "prefill-0", "router")
WITHIN_S = 15.0
"""Orphans take up to 5 s to let requests end; the rest is a busy machine."""


def test_any_child_may_be_killed(tmp_path: Path) -> None:
    with Up(tiny_model("llama", tmp_path), tmp_path) as up:
        up.read_until("^ready$")
        up.generate()  # decode-0 now maps prefill-0's pool
        for name in CHILDREN:
            _kill_and_await_its_successor(up, name)
            assert len(up.generate()["token_ids"]) == 4
        up.stop(signal.SIGTERM)


def _kill_and_await_its_successor(up: Up, name: str) -> None:
    up.footprint.watch(up.process.pid)
    pid, target = up.pids()[name], up.target()
    pool = owned_memfds(pid)
    assert bool(pool) == (name != "router"), "workers have their pool in a memfd"
    os.kill(pid, signal.SIGKILL)
    assert "killed by SIGKILL" in up.read_until(f"^{name} died")
    up.read_until(rf"^{name} .* pid")
    assert up.pids()[name] != pid
    assert up.target() == target, "a restarted router is found where it was"
    # What the dead one had is gone while the others live on: also the mapping a peer had of its pool.
    assert holders(pool) == []


@pytest.mark.parametrize("line", ["^router", "^ready$"], ids=["while loading", "while serving"])
def test_children_of_a_killed_supervisor_end_by_themselves(tmp_path: Path, line: str) -> None:
    with Up(tiny_model("llama", tmp_path), tmp_path) as up:
        up.read_until(line)
        if line == "^ready$":
            up.generate()
        up.footprint.watch(up.process.pid)
        assert len(up.footprint.processes) >= 2
        up.process.kill()
        up.process.wait()
        up.footprint.await_gone(WITHIN_S)
        assert list(up.temp.iterdir()) == []


def test_sigterm_while_loading(tmp_path: Path) -> None:
    with Up(tiny_model("llama", tmp_path), tmp_path) as up:
        up.read_until("^router")
        up.stop(signal.SIGTERM)
