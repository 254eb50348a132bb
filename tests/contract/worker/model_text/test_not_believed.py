"""Tests that a router that fetches the text side of a model takes known files of a bounded size, and waits for no one
for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import worker_pb2
from services.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    NoWorker,
    ProtocolViolation,
)
from services.core.model_files import MOST_PART_BYTES, MOST_TEXT_BYTES
from services.router.text.model_text_fetch import fetch_model_text
from services.rpc.serving import GrpcServer
from services.worker.session import WORKER_SERVICE
from tests.support.text_fetch import OnlyText, fetch, files, serving
from tests.support.trusted import CLUSTER_TOKEN, dial

MIB = 1 << 20
Part = worker_pb2.GetModelTextResponse


class Liar:
    """Answers as a worker with whatever a test makes of it: messages as bytes."""

    def __init__(self, answer: Callable[[], Iterator[bytes]], *, code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        self.num_sent = 0
        self.asked = asyncio.Event()
        self.ended = asyncio.Event()
        self._answer = answer
        self._code = code
        self._server = GrpcServer(token=CLUSTER_TOKEN)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        handlers = {"GetModelText": grpc.unary_stream_rpc_method_handler(self._respond)}  # type: ignore[arg-type]
        handler = grpc.method_handlers_generic_handler(WORKER_SERVICE, handlers)
        self._server.add(WORKER_SERVICE, lambda _, server: server.add_generic_rpc_handlers((handler,)), None)
        await self._server.start()
        try:
            yield self._server.address
        finally:
            await self._server.stop()

    async def _respond(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.asked.set()
        try:
            for message in self._answer():
                yield message
                self.num_sent += 1
            if self._code is not grpc.StatusCode.OK:
                context.set_code(self._code)
            elif not self.num_sent:
                await asyncio.Event().wait()
        finally:
            self.ended.set()


def message(name: str, data: bytes = b"x") -> bytes:
    return Part(name=name, data=data).SerializeToString()


NAMES = (
    "",
    ".",
    "..",
    "../config.json",
    "/tmp/config.json",
    "./config.json",
    "config.json/",
    "config.json\0",
    "CONFIG.JSON",
    "model.safetensors",
    "\x1b[2Jconfig.json",
    "x" * MIB,
)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        *((lambda name=name: iter([message(name)]), "is no file of a model's text") for name in NAMES),
        (lambda: iter([b"\xff\xff\xff"]), "are not a part"),
        (lambda: iter([b"\x0a\x02\xff\xfe"]), "are not a part"),
        (lambda: iter([b"\x1a\x01x"]), "is no file of a model's text"),
        (lambda: iter([b""]), "is no file of a model's text"),
    ],
)
async def test_lies(folder: Path, answer: Callable[[], Iterator[bytes]], words: str) -> None:
    around = sorted(folder.parent.iterdir())
    liar = Liar(answer)
    async with liar.serving() as address:
        with pytest.raises(ProtocolViolation, match=words) as caught:
            await fetch(address, folder)
        await liar.ended.wait()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200
    assert sorted(folder.parent.iterdir()) == around, "nothing is written elsewhere"
    assert not files(folder)


async def test_endless_data_ends_at_the_bound_and_is_not_kept(folder: Path) -> None:
    def answer() -> Iterator[bytes]:
        while True:
            yield message("tokenizer.json", bytes(MOST_PART_BYTES))

    liar = Liar(answer)
    async with liar.serving() as address:
        with pytest.raises(ProtocolViolation, match=f"more than {MOST_TEXT_BYTES} bytes"):
            await fetch(address, folder)
        await liar.ended.wait()
    assert not files(folder)
    assert liar.num_sent < 2 * MOST_TEXT_BYTES // MOST_PART_BYTES, "it is held back as it is read"


@pytest.mark.parametrize("begins", [True, False])
async def test_silence(folder: Path, begins: bool) -> None:
    servicer = OnlyText(folder)
    release = asyncio.Event()

    async def silent(write: Any) -> None:
        if begins:
            await write(Part(name="config.json", data=b"{}"))
        await release.wait()

    servicer.give = silent
    async with serving(servicer) as address:
        with pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"):
            await fetch(address, folder, within_s=0.3)
    assert not files(folder)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.UNIMPLEMENTED, BatonError),
        (grpc.StatusCode.UNAVAILABLE, NoWorker),
    ],
)
async def test_how_a_worker_may_end_the_call(folder: Path, code: grpc.StatusCode, error: type[BatonError]) -> None:
    liar = Liar(lambda: iter([message("config.json")]), code=code)
    async with liar.serving() as address:
        with pytest.raises(error) as caught:
            await fetch(address, folder)
    assert type(caught.value) is error


async def test_the_channel_is_closed_meanwhile() -> None:
    """This happens when the router gives up the worker: whoever fetches is told so, and is not taken for cancelled."""
    liar = Liar(lambda: iter(()))
    async with liar.serving() as address, dial(address) as channel:
        task = asyncio.create_task(fetch_model_text(channel, within_s=30.0))
        await liar.asked.wait()
        await channel.close()
        with pytest.raises(Cancelled):
            await task
        await liar.ended.wait()


async def test_nobody_is_there(folder: Path) -> None:
    with pytest.raises(NoWorker):
        await fetch("127.0.0.1:1", folder)
