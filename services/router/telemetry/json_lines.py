"""Appends JSON lines to a file that is rotated: what the usage log and the request log have in common.

Owns: the file, its rotation, and the thread that writes it; the event loop only puts entries into a queue that is
bounded in number and in bytes. Each batch is written and synced within a second, so a killed router loses at most that.
A batch that fails is written again, whole: each entry is there at least once, and has an id by which a reader drops
doubles. JSON is written in ASCII, so no text, whatever is in it, is more than one line. Never: what an entry says.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from services.core.errors import ConfigError
from services.core.printable import printable

log = logging.getLogger(__name__)

FLUSH_S = 0.5
"""Between two batches: with the time to write and sync one, an entry is on the disk within a second."""
MOST_WAITING = 65_536
"""How many entries wait to be written; what comes beyond them is dropped, and counted."""
MOST_WAITING_BYTES = 64 << 20
"""How much memory they may take, about."""
_CLOSE_WITHIN_S = 5.0
_BATCH = 1024
_BATCH_BYTES = 1 << 20
_ENTRY_BYTES = 1000
"""The size of an entry without the texts that its writer counts, about."""


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    unix_s: float
    fields: dict[str, Any]
    num_bytes: int


class JsonLines:
    """Is given entries by `put`, on the event loop. Open it, call `start`, and `close` at the end."""

    def __init__(
        self,
        flag: str,
        path: str,
        incarnation: int,
        *,
        most_bytes: int,
        most_files: int,
        dropped: Callable[[int], None],
        most_waiting: int = MOST_WAITING,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """Opens the file, or makes it. Errors name the flag. `incarnation` is the router's, and makes ids that no other
        start has.

        A file beyond `most_bytes` becomes `path.1`, that one `path.2`, and so on; there are at most `most_files`, the
        current one included. `dropped` is told how many entries were lost. Raises ConfigError.
        """
        self._flag = flag
        self._path = path
        self._incarnation = f"{incarnation:016x}"
        self._most_bytes = most_bytes
        self._most_files = most_files
        self._most_waiting = most_waiting
        self._most_waiting_bytes = most_waiting_bytes
        self._dropped = dropped
        self._wall_s = wall_s
        self._number = 0
        self._waiting: deque[_Entry] = deque()
        self._num_bytes_put = self._num_bytes_taken = 0
        """Each is changed by one thread alone; what waits has the difference."""
        self._num_dropped = self._num_told = 0
        """Entries that were dropped, and those of them that the log tells of."""
        self._complaint = ""
        """Why nothing can be written: it is said once."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"writer of {flag}", daemon=True)
        try:
            self._fd = self._open()
        except OSError as error:
            raise ConfigError(f"{flag}: {printable(path)}: {_reason(error)}") from error

    def start(self) -> None:
        self._thread.start()

    def put(self, fields: dict[str, Any], num_text_bytes: int = 0) -> None:
        """Notes an entry, which nobody may change any more. It waits for nothing.

        `num_text_bytes` is what its texts take beyond some hundred bytes.
        """
        self._number += 1
        num_bytes = _ENTRY_BYTES + num_text_bytes
        is_full = (
            len(self._waiting) >= self._most_waiting
            or self._num_bytes_put - self._num_bytes_taken + num_bytes > self._most_waiting_bytes
        )
        if is_full or self._closing.is_set():
            self._drop(1)
        else:
            self._num_bytes_put += num_bytes
            self._waiting.append(_Entry(self._number, self._wall_s(), fields, num_bytes))

    def close(self) -> None:
        """Writes what waits, and closes the file. Waits some seconds at most; what is not written then is dropped."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_WITHIN_S)
        if self._waiting:
            self._drop(len(self._waiting))
            num_lost = self._num_dropped - self._num_told
            log.error("%s: %s: %d requests were not written", self._flag, printable(self._path), num_lost)
        if not self._thread.is_alive():  # else it is stuck in the disk, with the descriptor
            os.close(self._fd)

    # On the thread

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(FLUSH_S)
            try:
                while batch := self._batch():
                    self._write(batch)
                    for entry in batch:  # only what is written leaves the queue
                        self._waiting.popleft()
                        self._num_bytes_taken += entry.num_bytes
                    self._recovered()
            except Exception as error:  # the outermost handler: what waits is tried again, and nothing else is stopped
                self._failed(_reason(error))

    def _batch(self) -> list[_Entry]:
        """Returns what is to be written next."""
        batch, num_bytes = list[_Entry](), 0
        while len(batch) < min(_BATCH, len(self._waiting)) and num_bytes < _BATCH_BYTES:
            batch.append(self._waiting[len(batch)])  # by index: the event loop appends meanwhile
            num_bytes += batch[-1].num_bytes
        return batch

    def _write(self, batch: list[_Entry]) -> None:
        """Appends the batch, and syncs it. Raises OSError, after which nothing of it is there, or a torn line is."""
        data = "".join(map(self._line, batch)).encode()
        if not self._is_current():  # somebody has moved or deleted it
            self._reopen()
        size = os.fstat(self._fd).st_size
        if size and size + len(data) > self._most_bytes:
            self._rotate()
            size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":  # what a killed router, or a full disk, has left
            data = b"\n" + data
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            raise

    def _line(self, entry: _Entry) -> str:
        ended = datetime.fromtimestamp(entry.unix_s, UTC).isoformat(timespec="milliseconds")
        line = {"id": f"{self._incarnation}-{entry.number}", "time": ended, **entry.fields}
        return json.dumps(line, separators=(",", ":")) + "\n"

    def _open(self) -> int:
        """Returns the descriptor of the file, which no other process may write. Raises OSError."""
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError("it is not a regular file")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise OSError("it is written already: each log of each router needs a file of its own") from error
            _sync_folder(self._path)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _reopen(self) -> None:
        fd, self._fd = self._fd, self._open()
        os.close(fd)

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        """Begins another file. The oldest goes where there would be too many, and the log says so."""
        oldest = f"{self._path}.{self._most_files - 1}"
        if os.path.lexists(oldest):
            log.warning("%s: %s is deleted: there may be %d files", self._flag, printable(oldest), self._most_files)
        for number in reversed(range(1, self._most_files - 1)):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{self._path}.{number}", f"{self._path}.{number + 1}")
        os.replace(self._path, f"{self._path}.1")
        self._reopen()

    def _failed(self, reason: str) -> None:
        if not self._complaint:
            text = "%s: %s: %s; up to %d requests wait until it can be written, and further ones are dropped"
            log.error(text, self._flag, printable(self._path), reason, self._most_waiting)
        self._complaint = reason

    def _recovered(self) -> None:
        num_lost = self._num_dropped - self._num_told
        self._num_told += num_lost
        if self._complaint or num_lost:
            log.warning("%s: %s is written; %d requests were dropped", self._flag, printable(self._path), num_lost)
        self._complaint = ""

    def _drop(self, number: int) -> None:
        self._num_dropped += number
        self._dropped(number)


def _sync_folder(path: str) -> None:
    """Has the file's name on the disk too."""
    fd = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
