"""Turns exceptions into statuses and malformed bytes into INVALID_ARGUMENT, between the runtime and every servicer.

Owns: the translation at the edge, for all four kinds of RPC. Never: authentication, logging of calls, or the meaning of
an error (`status.py` has it). A cancelled RPC stays a cancelled task.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from services.core import errors
from services.core.errors import MalformedMessage
from services.rpc import status

CallContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic only in grpc's type stubs
Behavior = Callable[[Any, CallContext], Any]

# Stands in for a request whose bytes did not parse. An exception in the deserialiser would reach the client as UNKNOWN.
_MALFORMED = object()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends an RPC with the status of the BatonError that its servicer raises (also from inside a TaskGroup).

    Any other exception becomes INTERNAL. Handlers of request streams must read the iterator they are given, not
    `context.read()`. Async-generator handlers are driven here, so that their `finally` blocks run inside the RPC's task
    when the client goes away.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:  # the method is unknown: the runtime answers UNIMPLEMENTED
            return None
        return _guarded(handler, handler_call_details.method)


def _guarded(handler: Any, method: str) -> Handler:
    wrap = _streaming if handler.response_streaming else _unary
    make, behavior = {
        (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    }[handler.request_streaming, handler.response_streaming]
    check = _Requests if handler.request_streaming else _checked
    guarded: Any = wrap(lambda request, context: behavior(check(request, method), context))
    return make(guarded, _lenient(handler.request_deserializer), _sparing(handler.response_serializer))


def _unary(behavior: Behavior) -> Behavior:
    async def respond(request: Any, context: CallContext) -> Any:
        async with _translated(context):
            return await behavior(request, context)

    return respond


def _streaming(behavior: Behavior) -> Behavior:
    async def respond(request: Any, context: CallContext) -> None:
        async with _translated(context):
            outcome = behavior(request, context)
            if inspect.isawaitable(outcome):  # the handler writes through the context itself
                await outcome
                return
            async with contextlib.aclosing(outcome) as responses:
                async for response in responses:
                    await context.write(response)

    return respond


@contextlib.asynccontextmanager
async def _translated(context: CallContext) -> AsyncIterator[None]:
    """Sets the RPC's status if the block raises, and suppresses the exception, so that the handler returns."""
    try:
        yield
    except grpc.aio.BaseError:  # an abort already under way, or a batch that failed because the client is gone
        raise
    except Exception as error:  # not CancelledError: it means that the RPC is being cancelled
        cause = _cause(error)
        if isinstance(cause, grpc.aio.BaseError):
            raise cause from None
        status.end(context, cause)
        errors.forget_frames(error)


def _cause(error: Exception) -> Exception:
    """Returns the error itself, or the only one inside a TaskGroup's ExceptionGroup."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _lenient(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserializer is None:
        return None

    def deserialize(data: bytes) -> Any:
        try:
            return deserializer(data)
        except Exception:  # whatever the parser raises, the client's bytes are at fault, and the handler reports it
            return _MALFORMED

    return deserialize


def _sparing(serializer: Callable[[Any], bytes] | None) -> Callable[[Any], bytes] | None:
    """Returns a serializer that leaves alone what is serialized already."""
    if serializer is None:
        return None
    return lambda response: response if isinstance(response, bytes) else serializer(response)


def _checked(request: Any, method: str) -> Any:
    if request is _MALFORMED:
        raise MalformedMessage(f"the bytes received are not a request of {method}")
    return request


class _Requests:
    """Wraps the runtime's request stream. Its iteration raises MalformedMessage where a message did not parse."""

    def __init__(self, requests: AsyncIterator[Any], method: str) -> None:
        self._requests = requests
        self._method = method
        self._iterator: AsyncIterator[Any] | None = None

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        if self._iterator is None:
            # Not earlier: a refused call reads no requests, and Python warns of an async iterator that is never used.
            self._iterator = aiter(self._requests)
        return _checked(await anext(self._iterator), self._method)
