"""Gives routers the text side of the worker's model: the files with which a router tokenises for it.

Owns: which files of the model directory are given, and that they are read off the event loop. Never: weights, nor any
file that a caller names.
"""

from __future__ import annotations

import asyncio
import logging
import pathlib
from collections.abc import Awaitable, Callable

from baton.v1 import worker_pb2
from services.core.errors import UnsupportedModel
from services.core.model_files import MOST_PART_BYTES, MOST_TEXT_BYTES, TEXT_FILES

log = logging.getLogger(__name__)


async def give_model_text(
    folder: str | pathlib.Path | None, write: Callable[[worker_pb2.GetModelTextResponse], Awaitable[None]]
) -> None:
    """Writes the files of a model directory in parts. The directory of a worker that has no model is None.

    Raises UnsupportedModel if the files are too large or cannot be read.
    """
    if folder is None:
        raise UnsupportedModel("this worker computes nothing, and has no model's text")
    files = await asyncio.to_thread(_read, pathlib.Path(folder))
    for name, data in files.items():
        for offset in range(0, max(1, len(data)), MOST_PART_BYTES):
            await write(worker_pb2.GetModelTextResponse(name=name, data=data[offset : offset + MOST_PART_BYTES]))
    num_bytes = sum(map(len, files.values()))
    log.info("a router was given the model's text: %d files, %d bytes", len(files), num_bytes)


def _read(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns those of `TEXT_FILES` that are in the folder."""
    files = {}
    for name in TEXT_FILES:
        try:
            files[name] = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            # Not the error's own text, which names the path: where a worker keeps its models is nobody else's business.
            why = error.strerror or type(error).__name__
            raise UnsupportedModel(f"{name} of the model cannot be read: {why}") from error
    num_bytes = sum(map(len, files.values()))
    if num_bytes > MOST_TEXT_BYTES:
        raise UnsupportedModel(f"the model's text has {num_bytes} bytes, and at most {MOST_TEXT_BYTES} are given")
    return files
