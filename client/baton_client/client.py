"""Provides the synchronous client, which several threads may share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc

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


class Client:
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
            self._channel = grpc.insecure_channel(target, options=options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=options)
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

    def generate(
        self, request: GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> GenerateResponse:
        """Returns the whole answer. `timeout_s` bounds it, repeated attempts included; then the workers stop."""
        demand_request(request)
        return self._call(self._generate, request, timeout_s, metadata)

    def generate_stream(
        self, request: GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> ResponseStream:
        """Returns the answer as it comes: first `prompt_info`, then chunks, last `completion`; with `n` one for each
        answer, by `index`."""
        demand_request(request)
        sent = (*self._metadata, *metadata)
        return ResponseStream(
            lambda remaining_s: self._generate_stream(request, timeout=remaining_s, metadata=sent),
            Attempts(self._retry, timeout_s),
        )

    def list_models(self, *, timeout_s: float | None = None, metadata: Metadata = ()) -> list[Model]:
        """Returns the models that are served."""
        return list(self._call(self._list_models, ListModelsRequest(), timeout_s, metadata).models)

    def close(self) -> None:
        """Ends the connection and cancels what is still under way."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        timeout_s: float | None,
        metadata: Metadata,
    ) -> _Response:
        attempts = Attempts(self._retry, timeout_s)
        while True:
            try:
                return method(request, timeout=attempts.remaining_s(), metadata=(*self._metadata, *metadata))
            except grpc.RpcError as error:
                pause_s = attempts.pause_s(error)
            time.sleep(pause_s)


class _StreamCall(Protocol):
    """Names what is used of a gRPC call."""

    def __next__(self) -> GenerateStreamResponse: ...
    def cancel(self) -> object: ...


class ResponseStream(Iterator[GenerateStreamResponse]):
    """Reads an answer that is being written. The end of `with` cancels it, if it has not ended by then."""

    def __init__(self, start: Callable[[float | None], _StreamCall], attempts: Attempts) -> None:
        """Makes the first attempt. `start` makes the call, which may last so many seconds."""
        self._start = start
        self._attempts = attempts
        self._cancelled = threading.Event()
        self._call = start(attempts.remaining_s())

    def cancel(self) -> None:
        """Ends the answer, from any thread; the workers stop within a step. Reading on raises CallCancelled."""
        self._cancelled.set()
        self._call.cancel()

    def __next__(self) -> GenerateStreamResponse:
        while True:
            try:
                response = next(self._call)
            except grpc.RpcError as error:
                pause_s = self._attempts.pause_s(error)
            else:
                self._attempts.received = True
                return response
            if not self._cancelled.wait(pause_s):
                self._call = self._start(self._attempts.remaining_s())
            if self._cancelled.is_set():
                self._call.cancel()  # also one that was started while it was being cancelled
                raise CallCancelled(grpc.StatusCode.CANCELLED, "cancelled by this client")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()
