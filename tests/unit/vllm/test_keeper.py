"""Tests that everything below a process is ended, and what it had in shared memory removed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.vllm.keeper import descendants, end_all, remove_unused, shared_memory_below
from tests.support import ROOT

pytestmark = pytest.mark.process

HOLDER = """
import mmap, os, signal, sys, time
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
if sys.argv[2] == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)
"""


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path(f"/dev/shm/baton-test-keeper {os.getpid()}")
    path.write_bytes(bytes(4096))
    yield path
    path.unlink(missing_ok=True)


def holding(path: Path, state: str = "runs") -> subprocess.Popen[str]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path), state], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "mapped\n"
    return holder


def ended(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert holder.stdout is not None
    holder.stdout.close()


def test_what_others_map_stays_until_they_are_gone(segment: Path) -> None:
    holder = holding(segment)
    assert holder.pid in descendants(os.getpid())
    assert str(segment) in shared_memory_below(os.getpid())
    assert remove_unused({str(segment)}) == {str(segment)}
    assert segment.exists()
    ended(holder)
    assert remove_unused({str(segment)}) == set()
    assert not segment.exists()
    assert remove_unused({str(segment)}) == set()


@pytest.mark.parametrize("state", ["runs", "stopped"])
def test_all_below_is_ended(segment: Path, state: str) -> None:
    """It runs in a process of its own: below this one are others' children."""
    program = (
        "import os, subprocess, sys; from services.vllm.keeper import descendants, end_all;"
        "command = [sys.executable, '-c', sys.argv[1], sys.argv[2], sys.argv[3]];"
        "one = subprocess.Popen(['/bin/sh', '-c', '\"$0\" \"$@\"; true', *command], stdout=subprocess.PIPE);"
        "one.stdout.readline(); assert len(descendants(os.getpid())) == 2;"
        "end_all(os.getpid(), set()); assert descendants(os.getpid()) == []"
    )
    began_s = time.monotonic()
    command = [sys.executable, "-c", program, HOLDER, str(segment), state]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=20.0).returncode == 0
    assert time.monotonic() - began_s < 3.0
    assert not segment.exists()


def test_there_is_nothing_below_a_process_that_is_gone(segment: Path) -> None:
    holder = holding(segment)
    ended(holder)
    assert descendants(holder.pid) == []
    assert shared_memory_below(holder.pid) == set()
    end_all(holder.pid, set())
    assert segment.exists(), "whoever made it may need it"


LOCKING = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
time.sleep(60)
"""


def test_what_nobody_maps_is_removed_by_pythons_tracker() -> None:
    """A semaphore's memory is not mapped by whoever has yet to open it, and only the tracker knows its name."""
    program = (
        "import os, subprocess, sys; from services.vllm.keeper import descendants, end_all;"
        "one = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE, text=True);"
        "print(one.stdout.readline()); end_all(os.getpid(), set()); assert descendants(os.getpid()) == []"
    )
    # A subreaper, as the keeper is: the tracker stays below it when its parent has ended.
    program = f"import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); {program}"
    command = [sys.executable, "-c", program, LOCKING]
    ended = subprocess.run(command, cwd=ROOT, check=True, timeout=20.0, capture_output=True, text=True)
    name = ended.stdout.split()[0].removeprefix("/")
    assert name.startswith("mp-")
    assert not Path(f"/dev/shm/sem.{name}").exists()
