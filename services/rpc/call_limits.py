"""Bounds what calls that need no token may cost: how many are open, and how many of them keep the server waiting.

A caller needs only one frame to open a call, and may then send nothing, send half a message, or not read the answer. A
server that is full ends the call that has kept it waiting longest; the HTTP server does the same with connections.
Calls whose messages are still arriving have a bound of their own, since the runtime holds the bytes received so far of
each; and so have the connections that such calls keep open, since a server accepts few. An answer of which nothing is
read ends after a while. Owns: these bounds, over the services that need no token. Never: calls that have the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc

from services.core.errors import BatonError, Cancelled, MalformedMessage, MessageTooLarge, Overloaded
from services.rpc.authentication import FOR_ANYONE
from services.rpc.interceptors import Behavior, CallContext, Handler

ARRIVING_BYTES = 256 << 20
"""The most bytes that messages still arriving may have together if each has the largest size allowed."""
GRACE_S = 0.5
"""Seconds for which a call may keep the server waiting before it may be ended to make room for others."""
WRITE_WITHIN_S = 60.0
"""How long a client may take nothing of its answer before it is given up, as it is over HTTP."""
SHORT_BYTES = 64 << 10
"""The longest request of an open call other than those that carry prompts."""
WITH_PROMPTS = frozenset({"/baton.v1.InferenceService/Generate", "/baton.v1.InferenceService/GenerateStream"})
"""The open calls whose requests may be long."""
_RETRY_AFTER_S = 1.0
_PROBE = "/grpc.health.v1.Health/Check"


def most_arriving(max_request_bytes: int) -> int:
    return max(4, min(256, ARRIVING_BYTES // max_request_bytes))


def most_held(max_connections: int) -> int:
    """Returns how many connections may be kept by calls that only wait for their clients: half, so that others are
    left to newcomers. A connection whose last call was ended is idle, and closed as such."""
    return max(4, max_connections // 2)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Applies the bounds to all calls of open services.

    It reads every request as a stream, to see how long it takes to arrive. On the wire this makes no difference.
    """

    def __init__(self, most: int, most_arriving: int, most_held: int, freed: Callable[[], None] = lambda: None) -> None:
        """`most` bounds the calls open at once; health probes (`Health/Check`) do not count. `most_held` bounds the
        connections on which calls keep the server waiting. `freed` is called when the bytes of a request that is too
        long are about to be freed."""
        self._calls = OpenCalls(most, most_arriving, most_held)
        self._freed = freed

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        found = await continuation(handler_call_details)
        handler: Any = found
        method = handler_call_details.method
        if handler is None or method.rpartition("/")[0].removeprefix("/") not in FOR_ANYONE:
            return found
        if handler.response_streaming:
            make, behavior = grpc.stream_stream_rpc_method_handler, handler.stream_stream or handler.unary_stream
            respond = self._streaming(behavior, handler.request_streaming)
        else:
            make, behavior = grpc.stream_unary_rpc_method_handler, handler.stream_unary or handler.unary_unary
            respond = self._unary(behavior, handler.request_streaming, is_probe=method == _PROBE)
        parse = handler.request_deserializer if method in WITH_PROMPTS else self._short(handler.request_deserializer)
        return make(respond, parse, handler.response_serializer)

    def _short(self, deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        """Returns the parser with a bound on the bytes: parsed, they may take many times as much memory."""

        def deserialize(data: bytes) -> Any:
            if len(data) > SHORT_BYTES:
                self._freed()
                raise MessageTooLarge(f"{len(data)} bytes")
            return deserializer(data)

        return deserialize

    def _unary(self, behavior: Behavior, many: bool, *, is_probe: bool) -> Behavior:
        async def respond(requests: AsyncIterator[Any], context: CallContext) -> Any:
            async with self._calls.open(context.peer(), is_probe=is_probe) as call:
                arriving = _Arriving(requests, call)
                return await behavior(arriving if many else await _first(arriving), context)

        return respond

    def _streaming(self, behavior: Behavior, many: bool) -> Behavior:
        async def respond(requests: AsyncIterator[Any], context: CallContext) -> None:
            async with self._calls.open(context.peer()) as call:
                arriving = _Arriving(requests, call)
                outcome = behavior(arriving if many else await _first(arriving), context)
                if inspect.isawaitable(outcome):  # the handler writes through the context itself, as Health.Watch does
                    with call.unread():
                        await outcome
                    return
                async with contextlib.aclosing(outcome) as responses:
                    async for response in responses:
                        with call.writing():
                            await context.write(response)

        return respond


class OpenCalls:
    """Keeps the open calls of one server, and which of them keep it waiting. Use it on the event loop only."""

    def __init__(self, most: int, most_arriving: int, most_held: int) -> None:
        self._most = most
        self._most_arriving = most_arriving
        self._most_held = most_held
        self._calls: set[OpenCall] = set()
        self._arriving: dict[OpenCall, int] = {}
        """Calls whose next message is awaited, oldest first, each with the running number of its wait."""
        self._unread: dict[OpenCall, int] = {}
        """Calls whose client is to read, in the same way."""
        self._num_waits = 0
        self._num_swept = 0
        """The value of `_num_waits` at the last sweep."""
        self._sweep: asyncio.TimerHandle | None = None
        self._writing: dict[OpenCall, int] = {}
        """Those of them with a message on its way, in the same way."""
        self._impatience: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._calls)

    @contextlib.asynccontextmanager
    async def open(self, peer: str, *, is_probe: bool = False) -> AsyncIterator[OpenCall]:
        """Counts a call as open within the block. `peer` names its connection.

        Raises Overloaded at once if there is no room, or later if the call is ended to make room for another.
        """
        if not is_probe and len(self._calls) >= self._most:
            self._make_room()
        call = OpenCall(self, peer)
        try:
            async with asyncio.timeout(None) as call.limit:
                if not is_probe:
                    self._calls.add(call)
                yield call
        except TimeoutError as error:
            if call.ended_by is None:
                raise
            raise call.ended_by from error
        finally:
            self._calls.discard(call)

    def arriving(self, call: OpenCall) -> contextlib.AbstractContextManager[None]:
        return self._waiting(self._arriving, call)

    def unread(self, call: OpenCall) -> contextlib.AbstractContextManager[None]:
        return self._waiting(self._unread, call)

    @contextlib.contextmanager
    def _waiting(self, waits: dict[OpenCall, int], call: OpenCall) -> Iterator[None]:
        self._begin(waits, call)
        try:
            yield
        finally:
            waits.pop(call, None)

    def _begin(self, waits: dict[OpenCall, int], call: OpenCall) -> None:
        self._num_waits += 1
        waits[call] = self._num_waits
        call.since_s = asyncio.get_running_loop().time()
        self._look_later()

    def begin_write(self, call: OpenCall) -> None:
        """Notes that a message is on its way to the client: the call is ended if it takes nothing for too long, since
        what is kept for it would stay. One timer serves all calls: one for each message would cost more than the rest
        of this."""
        self._begin(self._unread, call)
        self._writing[call] = self._num_waits
        if self._impatience is None:
            self._impatience = asyncio.get_running_loop().call_later(WRITE_WITHIN_S, self._give_up)

    def end_write(self, call: OpenCall) -> None:
        self._unread.pop(call, None)
        self._writing.pop(call, None)

    def _give_up(self) -> None:
        """Ends the calls whose clients take nothing."""
        self._impatience, loop = None, asyncio.get_running_loop()
        for call in list(self._writing):
            left_s = call.since_s + WRITE_WITHIN_S - loop.time()
            if left_s > 0:
                self._impatience = loop.call_later(left_s, self._give_up)
                break
            self._forget(call)
            call.end(Cancelled(f"nothing of the answer was read for {WRITE_WITHIN_S:g} s"))

    def _make_room(self) -> None:
        before_s = asyncio.get_running_loop().time() - GRACE_S
        oldest = [next(iter(waiting)) for waiting in (self._arriving, self._unread) if waiting]
        victim = min(oldest, key=lambda call: call.since_s, default=None)
        if victim is None or victim.since_s > before_s:
            raise Overloaded("the server has all the calls it can serve", retry_after_s=_RETRY_AFTER_S)
        self._evict(victim)

    def _look_later(self) -> None:
        # There are no more connections than calls, which are counted faster.
        is_due = len(self._arriving) > self._most_arriving or len(self._arriving) + len(self._unread) > self._most_held
        if self._sweep is None and is_due:
            self._sweep = asyncio.get_running_loop().call_later(GRACE_S, self._look)

    def _look(self) -> None:
        """Ends calls above the bounds on waiting ones, if they waited at the last sweep already.

        One sweep alone would be unfair: an event loop that was held up has not read what has arrived meanwhile.
        """
        self._sweep = None
        for call, number in list(self._arriving.items()):
            if len(self._arriving) <= self._most_arriving or number > self._num_swept:
                break
            self._evict(call)
        self._release_connections()
        self._num_swept = self._num_waits
        self._look_later()

    def _release_connections(self) -> None:
        """Ends all calls of connections that only wait, those first that have waited for longest, down to the bound.

        A connection with a call that the server works on is none of them: to end its other calls would free nothing.
        """
        num_open = Counter(call.peer for call in self._calls)
        waiting: dict[str, list[OpenCall]] = {}
        newest: dict[str, int] = {}
        """The number of the newest wait of each connection."""
        for call, number in (*self._arriving.items(), *self._unread.items()):
            waiting.setdefault(call.peer, []).append(call)
            newest[call.peer] = max(number, newest.get(call.peer, 0))
        held = sorted((peer for peer in waiting if len(waiting[peer]) >= num_open[peer]), key=newest.__getitem__)
        for peer in held[: max(0, len(held) - self._most_held)]:
            if newest[peer] > self._num_swept:
                break
            for call in waiting[peer]:
                self._evict(call)

    def _forget(self, call: OpenCall) -> None:
        """Drops a call that is to end: it keeps the server waiting no longer, and no room."""
        self._calls.discard(call)
        for waits in (self._arriving, self._unread, self._writing):
            waits.pop(call, None)

    def _evict(self, call: OpenCall) -> None:
        self._forget(call)
        message = "the server needs the room, and this call has kept it waiting"
        call.end(Overloaded(message, retry_after_s=_RETRY_AFTER_S))


class OpenCall:
    def __init__(self, calls: OpenCalls, peer: str) -> None:
        self.peer = peer
        self.limit: asyncio.Timeout
        self.ended_by: BatonError | None = None
        self.since_s = 0.0
        """Since when the call keeps the server waiting, in the event loop's seconds."""
        self._calls = calls

    def arriving(self) -> contextlib.AbstractContextManager[None]:
        """Marks the call, within the block, as waiting for a message of its client."""
        return self._calls.arriving(self)

    def unread(self) -> contextlib.AbstractContextManager[None]:
        """Marks the call, within the block, as waiting for its client to read, or in a handler that writes itself."""
        return self._calls.unread(self)

    def writing(self) -> OpenCall:
        """Marks the call, within the block, as waiting for its client to take one message, and bounds that wait."""
        return self

    def __enter__(self) -> None:  # a generator would cost three times as much, for each message
        self._calls.begin_write(self)

    def __exit__(self, *raised: object) -> None:
        self._calls.end_write(self)

    def end(self, error: BatonError) -> None:
        """Ends the call with the error, unless it is being ended."""
        if self.ended_by is None:
            self.ended_by = error
            self.limit.reschedule(asyncio.get_running_loop().time())


class _Arriving:
    """Reads the request stream of one call, and marks the call as waiting while the next request is awaited."""

    def __init__(self, requests: AsyncIterator[Any], call: OpenCall) -> None:
        self._requests = requests
        self._call = call

    def __aiter__(self) -> _Arriving:
        return self

    async def __anext__(self) -> Any:
        with self._call.arriving():
            return await anext(self._requests)


async def _first(requests: _Arriving) -> Any:
    try:
        return await anext(requests)
    except StopAsyncIteration:
        raise MalformedMessage("the stream ended without a request") from None
