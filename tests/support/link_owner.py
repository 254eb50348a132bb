"""Provides the two sides of a router's link to a worker: an owner that waits for its end, and a channel without a
worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from baton.v1 import control_pb2, types_pb2, worker_pb2
from services.router.workers.sessions import WorkerLink


class Owner:
    """Hears when the link opens, and how it ends. To be made on the event loop."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.lost: asyncio.Future[tuple[str, bool]] = asyncio.get_running_loop().create_future()
        """Why the link ended, and whether that counts as a crash."""

    def link_described(self, link: WorkerLink, worker: Any) -> None:
        pass

    def link_opened(self, link: WorkerLink) -> None:
        self.opened.set()

    def worker_message(self, link: WorkerLink, message: Any) -> None:
        pass

    def link_lost(self, link: WorkerLink, reason: str, *, crashed: bool) -> None:
        self.lost.set_result((reason, crashed))

    def link_defect(self, link: WorkerLink, error: Exception) -> None:
        raise error

    def heartbeat(self, link: WorkerLink) -> worker_pb2.RouterHeartbeat:
        return worker_pb2.RouterHeartbeat()


class FakeChannel:
    """Stands for a channel: every session says what it is, then some things more, and stays open or fails."""

    def __init__(
        self,
        load: types_pb2.LoadSnapshot | None = None,
        *,
        worker: control_pb2.WorkerDescription | None = None,
        failure: str | None = None,
        then: Sequence[worker_pb2.SessionResponse] = (),
    ) -> None:
        """`worker`: what the worker says it is. `failure`: what an INTERNAL error that ends the session says; None if
        it stays open."""
        self._worker = worker or control_pb2.WorkerDescription()
        self._load = load or types_pb2.LoadSnapshot(sequence_number=1)
        self._failure = failure
        self._then = then

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        return lambda: self

    unary_stream = unary_unary = stream_stream

    async def __aiter__(self) -> AsyncIterator[worker_pb2.SessionResponse]:
        yield worker_pb2.SessionResponse(load=self._load, worker=self._worker)
        for message in self._then:
            yield message
        if self._failure is None:
            await asyncio.Event().wait()
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, self._failure)

    async def write(self, request: worker_pb2.SessionRequest) -> None:
        pass

    def cancel(self) -> None:
        pass

    async def close(self) -> None:
        pass
