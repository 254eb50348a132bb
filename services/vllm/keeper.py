"""Starts vLLM, and ends all of it when the worker ends, however that happens.

vLLM's processes outlive one that is killed, and so does the shared memory between them. So this process stands between
the worker and vLLM: its standard input is a pipe whose other end only the worker has. When that end closes, or vLLM's
first process ends, every descendant is killed, stopped ones too, and what they had in /dev/shm is removed. They may be
dead by then, so it notes what they have there while vLLM loads, and once more when the pipe brings a byte: then it has.
Standard library only. Usage: python -m services.vllm.keeper FOLDER COMMAND...; FOLDER is removed in the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SHM = "/dev/shm/"
_GONE_WITHIN_S = 4.0
_LOOK_S = 0.5
_TRACKERS_S = 1.0
"""How long Python's trackers have to remove what killed processes have left: semaphores, whose names only they know."""


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends: also where it was stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def descendants(ancestor: int) -> list[int]:
    """Returns the processes below one, and not that itself."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, left = [], [ancestor]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def shared_memory_of(pid: int) -> Iterator[str]:
    """Yields the files in /dev/shm that a process maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        path = line.split(maxsplit=5)[5:]
        if path and path[0].startswith(_SHM) and not path[0].endswith(" (deleted)"):
            yield path[0]


def shared_memory_below(ancestor: int) -> set[str]:
    """Returns the files in /dev/shm that the processes below one map."""
    return {path for pid in descendants(ancestor) for path in shared_memory_of(pid)}


def end_all(ancestor: int, shared: set[str]) -> None:
    """Kills every process below `ancestor`, and removes the shared memory that only they had, `shared` included."""
    began_s = time.monotonic()
    while (left := descendants(ancestor)) and (waited_s := time.monotonic() - began_s) < _GONE_WITHIN_S:
        shared = shared | shared_memory_below(ancestor)  # what a process maps is unknown once it is dead
        for pid in left:
            if waited_s < _TRACKERS_S and _is_tracker(pid):
                continue  # it ends when all others have
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.01)
    remove_unused(shared)


def remove_unused(shared: set[str]) -> set[str]:
    """Removes those of the files that no process maps, and returns the others."""
    if not shared:
        return shared
    in_use = {path for entry in os.listdir("/proc") if entry.isdigit() for path in shared_memory_of(int(entry))}
    for path in shared - in_use:
        Path(path).unlink(missing_ok=True)
    return shared & in_use


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _wait(selector: selectors.BaseSelector, ended: int) -> tuple[int, set[str]]:
    """Waits until the worker or vLLM has ended. Returns `main`'s status, and the shared memory that was seen."""
    shared: set[str] = set()
    pause_s: float | None = _LOOK_S
    while True:
        ready = [key.fd for key, _ in selector.select(pause_s)]
        shared |= shared_memory_below(os.getpid())
        if ended in ready:
            return 1, shared
        if ready:
            if not os.read(sys.stdin.fileno(), 1):
                return 0, shared
            pause_s = None


def main() -> int:
    """Returns 0 when the worker has ended, and 1 when vLLM has."""
    folder, *command = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the pipe's end says when
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a terminal may stop who writes to it in the background
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    status, shared = 0, set[str]()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
        ended = os.pidfd_open(child.pid)
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
            selector.register(ended, selectors.EVENT_READ)
            status, shared = _wait(selector, ended)
    finally:
        end_all(os.getpid(), shared)
        shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
