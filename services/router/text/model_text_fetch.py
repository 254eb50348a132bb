"""Fetches the text side of a model that this router does not have from a worker that serves it.

Owns: the router's end of GetModelText, and that only files of known names are written, in a bounded size. Never: what
the files mean (`tokenisation`), or whether to ask another worker.
"""

from __future__ import annotations

import asyncio
import pathlib
import tempfile
from typing import Any

import grpc

from baton.v1 import worker_pb2, worker_pb2_grpc
from services.core.errors import Cancelled, DeadlineExceeded, InvalidRequest, ProtocolViolation
from services.core.model_files import MOST_TEXT_BYTES, TEXT_FILES
from services.core.printable import printable
from services.router.text.tokenisation import ModelText, load_model_text
from services.rpc.status import from_call

_MOST_QUOTED_CHARS = 80
_MOST_REASON_CHARS = 400


async def model_text_of(channel: grpc.aio.Channel, *, within_s: float) -> ModelText:
    """Returns the text side of the worker's model: the files go where they vanish once they are read.

    Raises what `fetch_model_text` does, and InvalidRequest if the files make no sense.
    """
    with tempfile.TemporaryDirectory(prefix="baton-model-") as folder:
        await fetch_model_text(channel, pathlib.Path(folder), within_s=within_s)
        try:
            return await asyncio.to_thread(load_model_text, folder)
        except Exception as error:  # a model's files may be wrong in any way
            reason = printable(str(error)[: 4 * _MOST_REASON_CHARS]).replace(f"{folder}/", "")[:_MOST_REASON_CHARS]
            raise InvalidRequest("worker.layout.model_id", f"its text cannot be used: {reason}") from None


async def fetch_model_text(channel: grpc.aio.Channel, folder: pathlib.Path, *, within_s: float) -> None:
    """Writes the files of the worker's model into `folder`, which exists and is empty.

    The channel carries the cluster token. Files that the model does not have are not there afterwards. Raises
    ProtocolViolation if the worker sends what no worker may, DeadlineExceeded after `within_s` seconds, Cancelled if
    the channel is closed meanwhile, OSError if the folder cannot be written, and for a failed call the error of its
    status (`services/rpc/status.py`). Whatever it raises, nothing is written any more, and what was written so far is
    the caller's to remove.
    """
    call: Any = worker_pb2_grpc.WorkerServiceStub(channel).GetModelText(worker_pb2.GetModelTextRequest())
    try:
        async with asyncio.timeout(within_s):
            await _receive(call, folder)
    except TimeoutError:
        raise DeadlineExceeded(f"the worker did not give its model's text within {within_s:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise from_call(error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Nobody has cancelled this task: the channel was closed under the call, and grpc.aio raises this for it.
        raise Cancelled("the channel was closed before the worker had given its model's text") from None
    finally:
        call.cancel()


async def _receive(call: Any, folder: pathlib.Path) -> None:
    num_bytes = 0
    async for part in call:
        if part is None:  # grpc.aio's word for bytes that are no such message
            raise ProtocolViolation("the worker sent bytes that are not a part of a model's text")
        if part.name not in TEXT_FILES:
            raise ProtocolViolation(f"{part.name[:_MOST_QUOTED_CHARS]!r} is no file of a model's text")
        num_bytes += len(part.data)
        if num_bytes > MOST_TEXT_BYTES:
            raise ProtocolViolation(f"the model's text has more than {MOST_TEXT_BYTES} bytes")
        await _write(folder / part.name, part.data)


async def _write(path: pathlib.Path, data: bytes) -> None:
    """Appends to the file off the event loop. If it is cancelled it waits for the write, so that none comes later."""
    writing = asyncio.ensure_future(asyncio.to_thread(_append, path, data))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise


def _append(path: pathlib.Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
