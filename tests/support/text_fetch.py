"""The two ends of the RPC that fetches a model's text: a server that has nothing else, and the call."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from baton.v1 import worker_pb2, worker_pb2_grpc
from services.router.text.model_text_fetch import fetch_model_text
from services.rpc.serving import GrpcServer
from services.worker.model_text import give_model_text
from services.worker.session import WORKER_SERVICE
from tests.support.trusted import CLUSTER_TOKEN, dial


class OnlyText(worker_pb2_grpc.WorkerServiceServicer):
    """Implements a worker's end of the RPC, with nothing else of a worker."""

    def __init__(self, folder: Path) -> None:
        self.give = partial(give_model_text, folder)

    async def GetModelText(self, request: worker_pb2.GetModelTextRequest, context: Any) -> None:
        await self.give(context.write)


@contextlib.asynccontextmanager
async def serving(servicer: OnlyText) -> AsyncIterator[str]:
    server = GrpcServer(token=CLUSTER_TOKEN)
    server.add(WORKER_SERVICE, worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


async def fetch(address: str, folder: Path, within_s: float = 30.0) -> None:
    async with dial(address) as channel:
        fetched = await fetch_model_text(channel, within_s=within_s)
    for name, data in fetched.items():
        (folder / name).write_bytes(data)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
