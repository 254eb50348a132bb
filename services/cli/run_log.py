"""Keeps the file into which the processes of one `baton up` write while its screen is a terminal's.

The processes append to the file themselves, so that none waits for the supervisor, and what one wrote last is there
when it has died. Owns: where the file is, its size, how many are kept, and which of its lines a person should see.
Never: how they are shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import tempfile
import time
from collections import deque

from services.core.errors import ConfigError
from services.core.home import baton_state
from services.core.own_files import opened
from services.core.printable import printable

MOST_BYTES = 32 << 20
"""The file's size; what is older is moved to a file beside it, of which there is one."""
NUM_KEPT = 10
"""Files of earlier starts that are left."""
_TAIL_BYTES = 64 << 10
"""Where the last lines of a process are looked for."""
_MOST_CHARS = 400
_CONSOLE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) +(\S+) (.*)")
"""A line as `services.rpc.logging` writes it for people: level, who, and the rest."""
_LOUD = ("WARNING", "ERROR", "CRITICAL")


@dataclasses.dataclass(frozen=True)
class LogLine:
    level: str
    """Empty if the line has none: it is a traceback's, or not a log record at all."""
    who: str
    text: str

    @property
    def is_loud(self) -> bool:
        """Returns whether the line is a warning or an error."""
        return self.level in _LOUD


def read_line(line: str) -> LogLine:
    """Returns what a line of the log says; it is made safe to show, and cut if it is long."""
    if (match := _CONSOLE.fullmatch(line)) is not None:
        level, who, text = match.groups()
        return LogLine(level, printable(who)[:_MOST_CHARS], printable(text)[:_MOST_CHARS])
    if line.startswith("{"):
        try:
            entry = json.loads(line)
            level, who, text = (str(entry[name]) for name in ("level", "instance", "message"))
            return LogLine(level, printable(who)[:_MOST_CHARS], printable(text)[:_MOST_CHARS])
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
    return LogLine("", "", printable(line)[:_MOST_CHARS])


class RunLog:
    """Represents the file of this start."""

    def __init__(self, folder: pathlib.Path | None = None) -> None:
        """Makes the file in `folder`, by default `logs` in Baton's state directory; if that cannot be written, in a
        folder of its own for temporary files. Only this user can read it. Raises ConfigError if neither is possible."""
        name = time.strftime(f"up-%Y%m%d-%H%M%S-{os.getpid()}.log")
        self._own_folder: pathlib.Path | None = None
        try:
            self.path = _prepared(folder or baton_state() / "logs") / name
            self.fd = _made(self.path)
        except OSError:
            try:
                self._own_folder = pathlib.Path(tempfile.mkdtemp(prefix="baton-"))
                self.path = self._own_folder / name
                self.fd = _made(self.path)
            except OSError as error:
                raise ConfigError(f"no log file can be made: {error.strerror}; --log-level info needs none") from error
        self._read_to = 0
        self._began: dict[str, int] = {}

    def close(self) -> bool:
        """Returns whether the file has anything; if not, it is removed, and so is a folder that was made for it."""
        size = os.fstat(self.fd).st_size
        os.close(self.fd)
        if not size:
            self.path.unlink(missing_ok=True)
            if self._own_folder is not None:
                with contextlib.suppress(OSError):  # there is more in it
                    self._own_folder.rmdir()
        return bool(size)

    def begin(self, name: str) -> None:
        """Notes that a process begins to write: what is there already is not its own."""
        self._began[name] = os.fstat(self.fd).st_size

    def news(self) -> list[LogLine]:
        """Returns the complete lines that came since the last call."""
        if self._read_to > os.fstat(self.fd).st_size:  # somebody has emptied it
            self._read_to = 0
        data = self._read_from(self._read_to)
        whole = data[: data.rfind(b"\n") + 1]
        self._read_to += len(whole)
        if self._read_to == os.fstat(self.fd).st_size > MOST_BYTES:
            self._turn()
        return [read_line(line) for line in whole.decode(errors="replace").splitlines()]

    def last_lines(self, name: str, most: int) -> list[str]:
        """Returns the last lines that are the process's, or nobody's: what an interpreter writes has no name."""
        size = os.fstat(self.fd).st_size
        start = max(self._began.get(name, 0), size - _TAIL_BYTES)
        lines = self._read_from(start).decode(errors="replace").splitlines()
        found: deque[str] = deque(maxlen=most)
        owner = ""
        for line in lines:
            read = read_line(line)
            # What is indented belongs to the record above it.
            owner = owner if not read.level and line.startswith("  ") else read.who
            if owner in ("", name) and line.strip():
                found.append(f"{read.level} {read.text}" if read.level else read.text)
        return list(found)

    def _read_from(self, offset: int) -> bytes:
        # By the descriptor, so that it can be read even where somebody has removed it.
        return os.pread(self.fd, max(0, os.fstat(self.fd).st_size - offset), offset)

    def _turn(self) -> None:
        """Moves what is there aside. The processes append, so they go on at the beginning of the emptied file; what one
        writes in the moment between is lost."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with contextlib.suppress(OSError), open(opened(self.path.with_suffix(".log.1"), flags), "wb") as aside:
            aside.write(self._read_from(0))
        os.truncate(self.fd, 0)
        self._read_to = 0
        self._began = dict.fromkeys(self._began, 0)


def _prepared(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder, which is made if need be, and of which the oldest files are removed, unless their cluster
    still runs."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    by_age = sorted(folder.glob("up-*.log"), key=lambda path: path.name)
    for path in by_age[:-NUM_KEPT]:
        with contextlib.suppress(OSError):
            _remove_unless_open(path)
    return folder


def _remove_unless_open(path: pathlib.Path) -> None:
    """Raises OSError if a run holds the lock of the file, which then stays."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.with_suffix(".log.1").unlink(missing_ok=True)
        path.unlink()
    finally:
        os.close(fd)


def _made(path: pathlib.Path) -> int:
    """Returns the new file, locked for as long as the run lasts: the processes of a cluster have it as their output,
    and it is unlocked when the last of them has closed it."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_EX)
    return fd
