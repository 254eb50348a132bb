"""What stands between the runtime and every servicer: exceptions become statuses, malformed bytes become
INVALID_ARGUMENT.

Owns: the translation at the edge, for all four kinds of RPC. Never: authentication, logging of calls, or the meaning
of an error (`status.py` has it). A cancelled RPC stays a cancelled task.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from services.core.errors import MalformedMessage
from services.rpc import status

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic only in its stubs
Behavior = Callable[[Any, Context], Any]

# Stands in for a request whose bytes did not parse. An exception in the deserialiser would reach the client as UNKNOWN.
_MALFORMED = object()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Servicers raise BatonError (also from inside a TaskGroup); clients get its status. Anything else is INTERNAL.

    Handlers of request streams must read the iterator they are given, not `context.read()`. Async-generator handlers
    are driven here, so that their `finally` blocks run inside the RPC's task when the client goes away.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method: the runtime answers UNIMPLEMENTED
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
    return make(guarded, _lenient(handler.request_deserializer), handler.response_serializer)


def _unary(behavior: Behavior) -> Behavior:
    async def respond(request: Any, context: Context) -> Any:
        async with _translated(context):
            return await behavior(request, context)

    return respond


def _streaming(behavior: Behavior) -> Behavior:
    async def respond(request: Any, context: Context) -> None:
        async with _translated(context):
            outcome = behavior(request, context)
            if inspect.isawaitable(outcome):  # writes through the context by itself
                await outcome
                return
            async with contextlib.aclosing(outcome) as responses:
                async for response in responses:
                    await context.write(response)

    return respond


@contextlib.asynccontextmanager
async def _translated(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.BaseError:  # an abort already under way, or a batch that failed because the client is gone
        raise
    except Exception as error:  # not CancelledError: that is the RPC being cancelled
        cause = _cause(error)
        if isinstance(cause, grpc.aio.BaseError):
            raise cause from None
        await status.abort(context, cause)


def _cause(error: Exception) -> Exception:
    """The error itself, or the only one inside a TaskGroup's ExceptionGroup."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _lenient(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserializer is None:
        return None

    def deserialize(data: bytes) -> Any:
        try:
            return deserializer(data)
        except Exception:  # whatever the parser says: the fault lies in the client's bytes, and the handler reports it
            return _MALFORMED

    return deserialize


def _checked(request: Any, method: str) -> Any:
    if request is _MALFORMED:
        raise MalformedMessage(f"the bytes received are not a request of {method}")
    return request


class _Requests:
    """The runtime's request stream; raises MalformedMessage where a message did not parse."""

    def __init__(self, requests: AsyncIterator[Any], method: str) -> None:
        self._requests = aiter(requests)
        self._method = method

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        return _checked(await anext(self._requests), self._method)
