"""Provides the asyncio client, which belongs to the event loop that it is made on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message

from baton.v1.inference_pb2 import (
    GenerateRequest,
    GenerateResponse,
    GenerateStreamResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
)
from baton_client.errors import CallCancelled
from baton_client.retries import A_FEW_TIMES, Attempts, RetryPolicy
from baton_client.wire import GENERATE, GENERATE_STREAM, LIST_MODELS, OPTIONS, ChannelOptions, Metadata, demand_request

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class AsyncClient:
    """Connects to a router when it is first needed. Failed calls raise CallFailed or a class below it."""

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
        retry: RetryPolicy = A_FEW_TIMES,
        options: ChannelOptions = OPTIONS,
    ) -> None:
        """Takes HOST:PORT, and `credentials` for TLS where something in front of the router speaks it. `metadata` goes
        with every call; `options` are the gRPC channel's."""
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=options)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=options)
        self._metadata = tuple(metadata)
        self._retry = retry
        self._generate = self._channel.unary_unary(
            GENERATE, GenerateRequest.SerializeToString, GenerateResponse.FromString
        )
        self._generate_stream = self._channel.unary_stream(
            GENERATE_STREAM, GenerateRequest.SerializeToString, GenerateStreamResponse.FromString
        )
        self._list_models = self._channel.unary_unary(
            LIST_MODELS, ListModelsRequest.SerializeToString, ListModelsResponse.FromString
        )

    async def generate(
        self, request: GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> GenerateResponse:
        """Returns the whole answer. `timeout_s` bounds it, repeated attempts included; then the workers stop."""
        demand_request(request)
        return await self._call(self._generate, request, timeout_s, metadata)

    def generate_stream(
        self, request: GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> AsyncResponseStream:
        """Returns the answer as it comes: first `prompt_info`, then chunks, last `completion`; with `n` one for each
        answer, by `index`."""
        demand_request(request)
        sent = (*self._metadata, *metadata)
        return AsyncResponseStream(
            lambda remaining_s: self._generate_stream(request, timeout=remaining_s, metadata=sent),
            Attempts(self._retry, timeout_s),
        )

    async def list_models(self, *, timeout_s: float | None = None, metadata: Metadata = ()) -> list[Model]:
        """Returns the models that are served."""
        return list((await self._call(self._list_models, ListModelsRequest(), timeout_s, metadata)).models)

    async def close(self) -> None:
        """Ends the connection and cancels what is still under way."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        timeout_s: float | None,
        metadata: Metadata,
    ) -> _Response:
        attempts = Attempts(self._retry, timeout_s)
        while True:
            try:
                return await method(request, timeout=attempts.remaining_s(), metadata=(*self._metadata, *metadata))
            except grpc.aio.AioRpcError as error:
                pause_s = attempts.pause_s(error)
            await asyncio.sleep(pause_s)


class AsyncResponseStream(AsyncIterator[GenerateStreamResponse]):
    """Reads an answer that is being written. The end of `async with` cancels it unless it has ended, and so does
    the cancellation of the task that reads it."""

    def __init__(
        self,
        start: Callable[[float | None], grpc.aio.UnaryStreamCall[Message, GenerateStreamResponse]],
        attempts: Attempts,
    ) -> None:
        """Makes the first attempt. `start` makes the call, which may last so many seconds."""
        self._start = start
        self._attempts = attempts
        self._cancelled = asyncio.Event()
        self._call = start(attempts.remaining_s())

    def cancel(self) -> None:
        """Ends the answer; the workers stop within a step. Reading on raises CallCancelled."""
        self._cancelled.set()
        self._call.cancel()

    async def __anext__(self) -> GenerateStreamResponse:
        while True:
            try:
                response = await self._call.read()
            except grpc.aio.AioRpcError as error:
                pause_s = self._attempts.pause_s(error)
            except asyncio.CancelledError:
                # gRPC raises this one, too, for a call that was cancelled by `cancel`.
                task = asyncio.current_task()
                if not self._cancelled.is_set() or (task is not None and task.cancelling()):
                    raise
                raise CallCancelled(grpc.StatusCode.CANCELLED, "cancelled by this client") from None
            else:
                if not isinstance(response, GenerateStreamResponse):  # the end of the stream
                    raise StopAsyncIteration
                self._attempts.received = True
                return response
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._cancelled.wait(), pause_s)
            if self._cancelled.is_set():
                raise CallCancelled(grpc.StatusCode.CANCELLED, "cancelled by this client")
            self._call = self._start(self._attempts.remaining_s())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()
