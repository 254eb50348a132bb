"""Fetches the text side of a model that this router does not have from a worker that serves it.

Owns: the router's end of GetModelText, and that only files of known names are taken, in a bounded size. Never: what
the files mean (`tokenisation`), or whether to ask another worker.
"""

from __future__ import annotations

import asyncio
import pathlib
import tempfile
from collections.abc import Mapping
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
    """Returns the text side of the worker's model.

    Raises what `fetch_model_text` does, OSError if the files cannot be written, and InvalidRequest if they make no
    sense.
    """
    return await asyncio.to_thread(_load, await fetch_model_text(channel, within_s=within_s))


def _load(files: Mapping[str, bytes]) -> ModelText:
    """Writes the files where they vanish once they are read."""
    with tempfile.TemporaryDirectory(prefix="baton-model-") as folder:
        for name, data in files.items():
            (pathlib.Path(folder) / name).write_bytes(data)
        try:
            return load_model_text(folder)
        except Exception as error:  # a model's files may be wrong in any way
            reason = printable(str(error)[: 4 * _MOST_REASON_CHARS]).replace(f"{folder}/", "")[:_MOST_REASON_CHARS]
            raise InvalidRequest("worker.layout.model_id", f"its text cannot be used: {reason}") from None


async def fetch_model_text(channel: grpc.aio.Channel, *, within_s: float) -> dict[str, bytes]:
    """Returns the files of the worker's model by their names; those that the model does not have are not among them.

    The channel carries the cluster token. Raises ProtocolViolation if the worker sends what no worker may,
    DeadlineExceeded after `within_s` seconds, Cancelled if the channel is closed meanwhile, and for a failed call the
    error of its status (`services/rpc/status.py`).
    """
    call: Any = worker_pb2_grpc.WorkerServiceStub(channel).GetModelText(worker_pb2.GetModelTextRequest())
    try:
        async with asyncio.timeout(within_s):
            return await _receive(call)
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


async def _receive(call: Any) -> dict[str, bytes]:
    parts: dict[str, list[bytes]] = {}
    num_bytes = 0
    async for part in call:
        if part is None:  # grpc.aio's word for bytes that are no such message
            raise ProtocolViolation("the worker sent bytes that are not a part of a model's text")
        if part.name not in TEXT_FILES:
            raise ProtocolViolation(f"{part.name[:_MOST_QUOTED_CHARS]!r} is no file of a model's text")
        num_bytes += len(part.data)
        if num_bytes > MOST_TEXT_BYTES:
            raise ProtocolViolation(f"the model's text has more than {MOST_TEXT_BYTES} bytes")
        parts.setdefault(part.name, []).append(part.data)
    return {name: b"".join(data) for name, data in parts.items()}
