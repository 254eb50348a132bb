"""Reads the requests of Generate and GenerateStream from gRPC: their bytes are counted, charged, checked, then parsed.

For a unary RPC the runtime parses the request before it can be refused, and keeps its bytes until the RPC ends. On the
wire a stream of one message is the same, so these two RPCs are served as streams of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from baton.v1 import inference_pb2
from services.core.errors import MalformedMessage
from services.router.front.call import ByteBudget, Charge, Incoming
from services.rpc import wire_count
from services.rpc.call_limits import WITH_PROMPTS
from services.rpc.interceptors import Behavior, CallContext, Handler

READ_WITHIN_S = 60.0


class ReadInterceptor(grpc.aio.ServerInterceptor):
    """Gives handlers an `Incoming` in place of the request, charged to the budget until they end."""

    def __init__(
        self,
        budget: ByteBudget,
        max_text_bytes: int,
        counting: Callable[[CallContext], contextlib.AbstractContextManager[None]],
    ) -> None:
        """`counting` makes what counts a request that is refused while it is read."""
        self._budget = budget
        self._counting = counting
        self._limits = wire_count.MessageLimits(text_bytes=max_text_bytes)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        found = await continuation(handler_call_details)
        handler: Any = found
        if handler is None or handler_call_details.method not in WITH_PROMPTS:
            return found
        if handler.response_streaming:
            streaming = self._streaming(handler.unary_stream)
            return grpc.stream_stream_rpc_method_handler(streaming, _boxed, handler.response_serializer)
        unary = self._unary(handler.unary_unary)
        return grpc.stream_unary_rpc_method_handler(unary, _boxed, handler.response_serializer)

    def _unary(self, behavior: Behavior) -> Behavior:
        async def respond(requests: AsyncIterator[list[bytes]], context: CallContext) -> Any:
            with self._budget.charge() as charge:
                return await behavior(await self._read(requests, charge, context), context)

        return respond

    def _streaming(self, behavior: Behavior) -> Behavior:
        async def respond(requests: AsyncIterator[list[bytes]], context: CallContext) -> AsyncIterator[Any]:
            with self._budget.charge() as charge:
                async with contextlib.aclosing(
                    behavior(await self._read(requests, charge, context), context)
                ) as responses:
                    async for response in responses:
                        yield response

        return respond

    async def _read(self, requests: AsyncIterator[list[bytes]], charge: Charge, context: CallContext) -> Incoming:
        with self._counting(context):
            return await _read(requests, charge, self._limits)


def _boxed(data: bytes) -> list[bytes]:
    """Puts the bytes into a list, from which they can be taken: the runtime keeps the list until the RPC ends."""
    return [data]


async def _read(requests: AsyncIterator[list[bytes]], charge: Charge, limits: wire_count.MessageLimits) -> Incoming:
    try:
        async with asyncio.timeout(READ_WITHIN_S):
            box = await anext(requests, None)
    except TimeoutError as error:
        raise MalformedMessage(f"the request did not arrive within {READ_WITHIN_S:g} s") from error
    if box is None:
        raise MalformedMessage("the stream ended without a request")
    data = box.pop()
    charge.grow(len(data))
    wire_count.check(data, inference_pb2.GenerateRequest.DESCRIPTOR, limits)
    try:
        return Incoming(inference_pb2.GenerateRequest.FromString(data), charge)
    except DecodeError as error:
        raise MalformedMessage("the bytes received are not a GenerateRequest") from error
