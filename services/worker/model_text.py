"""Gives routers the text side of the worker's model: the files with which a router tokenises for it.

Owns: which files of the model directory are given, the reading of them off the event loop, and the bounds: of their
size, of how many calls may read at once, and of how long one may take. Never: weights, nor any file that a caller
names.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pathlib
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from baton.v1 import worker_pb2
from services.core.clock import Clock
from services.core.errors import DeadlineExceeded, Overloaded, UnsupportedModel
from services.core.model_files import MOST_PART_BYTES, MOST_TEXT_BYTES, TEXT_FILES
from services.core.timeouts import timeout_after

log = logging.getLogger(__name__)

MOST_CALLS = 4
"""The most calls that are answered at once. A router asks once for each model, unless an attempt fails."""
_WITHIN_S = 60.0
"""Seconds in which a router must have read everything; then its call ends, and another may have its place."""
_RETRY_AFTER_S = 1.0


class ModelTextHost:
    """Answers GetModelText from one model directory; None is that of a worker that has no model. Use it on the event
    loop only.

    `clock` is of awake time, since it judges routers.
    """

    def __init__(self, folder: str | pathlib.Path | None, clock: Clock, *, within_s: float = _WITHIN_S) -> None:
        self._folder = None if folder is None else pathlib.Path(folder)
        self._clock = clock
        self._within_s = within_s
        self._num_calls = 0

    def __len__(self) -> int:
        """Returns how many calls are being answered."""
        return self._num_calls

    async def serve(self, write: Callable[[worker_pb2.GetModelTextResponse], Awaitable[None]]) -> None:
        """Runs the body of the RPC.

        Raises Overloaded if others take all the places, DeadlineExceeded if the router reads too slowly, and
        UnsupportedModel if the files are too large or cannot be read.
        """
        if self._num_calls >= MOST_CALLS:
            message = f"the worker gives its model's text to {MOST_CALLS} callers already, and to no more at once"
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S)
        self._num_calls += 1
        try:
            async with timeout_after(self._within_s, self._clock):
                await self._send(write)
        except TimeoutError:
            raise DeadlineExceeded(f"the model's text was not read within {self._within_s:g} s") from None
        finally:
            self._num_calls -= 1

    async def _send(self, write: Callable[[worker_pb2.GetModelTextResponse], Awaitable[None]]) -> None:
        if self._folder is None:
            raise UnsupportedModel("this worker computes nothing, and has no model's text")
        files = await asyncio.to_thread(text_files, self._folder)
        for file in files:
            for offset in range(0, max(1, file.num_bytes), MOST_PART_BYTES):
                data = await asyncio.to_thread(file.read_part, offset)
                await write(worker_pb2.GetModelTextResponse(name=file.name, data=data))
        num_bytes = sum(file.num_bytes for file in files)
        log.info("a router was given the model's text: %d files, %d bytes", len(files), num_bytes)


@dataclass(frozen=True, slots=True)
class TextFile:
    """Describes a file as it was when it was found.

    It is opened anew for each part, so that a call which ends while a thread reads leaves nothing open.
    """

    path: pathlib.Path
    num_bytes: int
    _identity: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.path.name

    def read_part(self, offset: int) -> bytes:
        """Returns the bytes from `offset` on, MOST_PART_BYTES or what is left.

        Raises UnsupportedModel if the file cannot be read, or is not the one that was found: parts of two versions
        would make a file that never was.
        """
        num_bytes = min(MOST_PART_BYTES, self.num_bytes - offset)
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                data = file.read(num_bytes)
                is_same = _identity(os.fstat(file.fileno())) == self._identity and len(data) == num_bytes
        except OSError as error:
            raise _unreadable(self.name, error) from error
        if not is_same:
            raise UnsupportedModel(f"{self.name} of the model was changed while it was read")
        return data


def text_files(folder: pathlib.Path) -> list[TextFile]:
    """Returns those of `TEXT_FILES` that are in the folder.

    Raises UnsupportedModel if one cannot be read, or all together have more than MOST_TEXT_BYTES.
    """
    found = []
    for name in TEXT_FILES:
        path = folder / name
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _unreadable(name, error) from error
        if stat.S_ISREG(status.st_mode):  # opening a pipe could hold a thread for ever
            found.append(TextFile(path, status.st_size, _identity(status)))
    num_bytes = sum(file.num_bytes for file in found)
    if num_bytes > MOST_TEXT_BYTES:
        raise UnsupportedModel(f"the model's text has {num_bytes} bytes, and at most {MOST_TEXT_BYTES} are given")
    return found


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _unreadable(name: str, error: OSError) -> UnsupportedModel:
    # Not the error's own text, which names the path: where a worker keeps its models is nobody else's business.
    return UnsupportedModel(f"{name} of the model cannot be read: {error.strerror or type(error).__name__}")
