"""Lists what processes hold outside of themselves, as the kernel shows it, and what of it is still there later.

Owns: reading /proc. Never: starts or ends a process.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.patience import Patience

_LISTEN = "0A"
"""The state in /proc/net/tcp."""
_GONE = (ProcessLookupError, FileNotFoundError, PermissionError)


@dataclass(slots=True)
class Footprint:
    """Watches a process and its descendants. Everything that `watch` has seen once must be gone at the end."""

    processes: set[psutil.Process] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)
    """TCP, listening."""
    sockets: set[str] = field(default_factory=set)
    """Unix sockets by name; '@' first for the abstract namespace."""
    memfds: set[int] = field(default_factory=set)
    """Inodes of shared memory without a name, open or mapped."""
    segments: set[str] = field(default_factory=set)
    """Files in /dev/shm."""

    def watch(self, root: int) -> None:
        try:
            process = psutil.Process(root)
            each = (process, *process.children(recursive=True))
        except psutil.NoSuchProcess:  # it has ended by itself, as one that did not take its flags
            return
        for one in each:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._watch(one)

    def _watch(self, process: psutil.Process) -> None:
        self.processes.add(process)
        for connection in process.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                self.ports.add(connection.laddr.port)
        for connection in process.net_connections(kind="unix"):
            if connection.laddr:
                self.sockets.add(str(connection.laddr))
        self.memfds.update(memfds(process.pid))
        self.segments.update(path for path in _open_paths(process.pid) if path.startswith("/dev/shm/"))

    def left(self) -> list[str]:
        """Returns in words what has not gone."""
        words = [f"process {process}" for process in self.processes if _runs(process)]
        words += [f"port {port}" for port in self.ports & set(_listening_ports())]
        names = Path("/proc/net/unix").read_text()
        words += [f"socket {name}" for name in self.sockets if name in names]
        words += [f"memfd {inode} in process {pid}" for inode, pid in holders(self.memfds)]
        words += [f"segment {path}" for path in self.segments if os.path.exists(path)]
        return words

    def await_gone(self, timeout_s: float) -> None:
        patience = Patience(timeout_s)
        while left := self.left():
            assert not patience.is_over(), f"left behind after {patience.waited_s:.1f} s: {', '.join(left)}"
            time.sleep(0.05)


def children_left(timeout_s: float = 5.0) -> list[psutil.Process]:
    """Returns the descendants of this process that still run after the wait, but for the tracker of Python's own shared
    memory."""
    deadline_s = time.monotonic() + timeout_s
    while left := [each for each in psutil.Process().children(recursive=True) if _runs(each) and not _is_tracker(each)]:
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
    return left


def owned_memfds(pid: int) -> set[int]:
    """Inodes of the memfds a process may write. (Peers have a read-only descriptor, kept by their mapping.)"""
    return {os.stat(fd).st_ino for fd in _memfd_descriptors(pid) if _is_writable(pid, os.path.basename(fd))}


def memfds(pid: int) -> set[int]:
    """Inodes of the memfds a process has open or mapped."""
    with contextlib.suppress(*_GONE):
        mapped = {int(line.split()[4]) for line in _maps(pid) if "/memfd:" in line}
        return mapped | {os.stat(fd).st_ino for fd in _memfd_descriptors(pid)}
    return set()


def holders(inodes: Iterable[int]) -> list[tuple[int, int]]:
    """Returns (inode, pid) of every process on this machine that has one of these memfds open or mapped."""
    wanted = set(inodes)
    return [(inode, pid) for pid in psutil.pids() for inode in memfds(pid) & wanted] if wanted else []


def _memfd_descriptors(pid: int) -> Iterator[str]:
    """Yields the memfds that a process has open, as paths."""
    for link in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(*_GONE):
            if os.readlink(link.path).startswith("/memfd:"):
                yield link.path


def _is_writable(pid: int, fd: str) -> bool:
    match = re.search(r"^flags:\s*(\d+)", Path(f"/proc/{pid}/fdinfo/{fd}").read_text(), re.MULTILINE)
    return match is not None and int(match[1], 8) & os.O_ACCMODE == os.O_RDWR


def _open_paths(pid: int) -> Iterator[str]:
    with contextlib.suppress(*_GONE):
        for link in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(*_GONE):
                yield os.readlink(link.path)
        yield from (line.split(maxsplit=5)[5].rstrip("\n") for line in _maps(pid) if "/dev/shm/" in line)


def _maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def _listening_ports() -> Iterator[int]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            match = re.match(r"\s*\d+: \w+:(\w+) \S+ (\w+)", line)
            if match and match[2] == _LISTEN:
                yield int(match[1], 16)


def _runs(process: psutil.Process) -> bool:
    """A zombie holds nothing; it is whoever should reap it who is late."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False
