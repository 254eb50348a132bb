"""Implements what grpc.aio offers to callers: a channel, and calls of the kinds that Baton has, over the simulated
network."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc

from tests.sim.network import Network, Wire
from tests.sim.node import Node

_CONNECT_RETRY_S = 0.3
_CODE = grpc.StatusCode


class SimChannel:
    def __init__(self, node: Node, network: Network, address: str) -> None:
        self._node = node
        self._network = network
        self._address = address
        self._calls: dict[SimCall, None] = {}

    async def __aenter__(self) -> SimChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for call in list(self._calls):
            call.cancel()

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., SimCall]:
        def start(requests: AsyncIterator[Any] | None = None, **_: Any) -> SimCall:
            call = self._call(method, request_serializer, response_deserializer)
            if requests is not None:
                call.send_all(requests)
            return call

        return start

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., SimCall]:
        def start(request: Any, **_: Any) -> SimCall:
            async def requests() -> AsyncIterator[Any]:
                yield request

            call = self._call(method, request_serializer, response_deserializer)
            call.send_all(requests())
            return call

        return start

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., UnaryCall]:
        def start(
            request: Any, *, timeout: float | None = None, wait_for_ready: bool | None = None, **_: Any
        ) -> UnaryCall:
            call = self._call(method, request_serializer, response_deserializer, wait_for_ready=bool(wait_for_ready))
            return UnaryCall(call, request, timeout)

        return start

    def _call(self, method: str, serializer: Any, deserializer: Any, *, wait_for_ready: bool = False) -> SimCall:
        call = SimCall(self._node, self._network, self._address, method, serializer, deserializer, wait_for_ready)
        self._calls[call] = None
        call.add_done_callback(lambda call: self._calls.pop(call, None))
        call.connect()
        return call


class SimCall:
    """A bidirectional call; `UnaryCall` is made of one."""

    def __init__(
        self,
        node: Node,
        network: Network,
        address: str,
        method: str,
        serializer: Any,
        deserializer: Any,
        wait_for_ready: bool,
    ) -> None:
        self._node = node
        self._network = network
        self._address = address
        self._method = method
        self._serializer = serializer
        self._deserializer = deserializer
        self._wait_for_ready = wait_for_ready
        self._wire: Wire | None = None
        self.heard_s = 0.0
        self._responses: deque[bytes] = deque()
        self._coming_status: tuple[grpc.StatusCode, str, Any] | None = None
        self._status: tuple[grpc.StatusCode, str, Any] | None = None
        self._has_metadata = False
        self._half_closed = False
        self._locally_cancelled = False
        self._changed = asyncio.Event()
        self._callbacks: list[Callable[[Any], object]] = []
        self._sender: asyncio.Task[None] | None = None

    # As grpc.aio.StreamStreamCall.

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self._status is not None and self._status[0] is _CODE.CANCELLED

    def cancel(self) -> bool:
        if self.done():
            return False
        self._locally_cancelled = True
        if self._wire is not None:
            self._wire.up.send(("cancel",))
        self._finish(_CODE.CANCELLED, "Locally cancelled by application!")  # the wire stays until the server knows
        return True

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._callbacks.append(callback)

    async def code(self) -> grpc.StatusCode:
        await self._until(self.done)
        assert self._status is not None
        return self._status[0]

    async def initial_metadata(self) -> tuple[Any, ...]:
        await self._until(lambda: self._has_metadata or self.done())
        return ()

    async def wait_for_connection(self) -> None:
        await self._until(lambda: self._wire is not None or self.done())
        self._raise_unless_ok()

    async def write(self, request: Any) -> None:
        if self.done() or self._half_closed:
            raise asyncio.InvalidStateError("RPC already finished.")
        await self._until(lambda: self._wire is not None or self.done())
        if self._wire is None or self.done():
            self._raise_unless_ok()
            raise asyncio.InvalidStateError("RPC already finished.")
        try:
            await self._wire.up.send_message(("message", self._serializer(request)))
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.done():
            self._raise_unless_ok()

    async def done_writing(self) -> None:
        if not self.done() and self._wire is not None:
            self._half_closed = True
            self._wire.up.send(("half_close",))

    async def read(self) -> Any:
        await self._until(lambda: bool(self._responses) or self.done())
        if not self._responses or self.cancelled():
            self._raise_unless_ok()
            return grpc.aio.EOF
        data = self._responses.popleft()
        assert self._wire is not None
        self._wire.down.was_read()
        self._take_status()
        return self._deserializer(data)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Any]:
        while (response := await self.read()) is not grpc.aio.EOF:
            yield response

    # Inside.

    def connect(self) -> None:
        self._network.world.after(self._network.latency_s, lambda: self._node.loop.call_soon(self._try_connect))

    def _try_connect(self) -> None:
        if self.done():
            return
        server = self._network.servers.get(self._address)
        if server is None:
            if not self._wait_for_ready:
                self._finish(_CODE.UNAVAILABLE, f"connection refused: {self._address}")
            else:
                self._network.world.after(_CONNECT_RETRY_S, lambda: self._node.loop.call_soon(self._try_connect))
            return
        wire = self._wire = Wire(self._network, self._node, server.node, self._method)
        self.heard_s = self._network.world.now_s
        if self._method.endswith("/Session"):
            self._node.sessions[self] = None
        wire.down.receiver = self._received
        wire.client_lost = self._lost
        wire.up.receiver = lambda packet: server.accept(self._method, wire)
        wire.up.send(("open",))
        self._changed.set()

    def send_all(self, requests: AsyncIterator[Any]) -> None:
        self._sender = self._node.loop.create_task(self._send_all(requests), name=f"requests of {self._method}")

    async def _send_all(self, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                await self.write(request)
            await self.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass  # whoever reads learns why

    async def _until(self, condition: Callable[[], bool]) -> None:
        try:
            while not condition():
                self._changed.clear()
                await self._changed.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _received(self, packet: tuple[Any, ...]) -> None:
        if self.done():
            return
        self.heard_s = self._network.world.now_s
        match packet[0]:
            case "metadata":
                self._has_metadata = True
            case "message":
                self._responses.append(packet[1])
            case "status":
                self._coming_status = packet[1], packet[2], packet[3]
                self._take_status()
        self._changed.set()

    def _take_status(self) -> None:
        """The runtime tells the status when all messages before it were read."""
        if self._coming_status is not None and not self._responses:
            self._finish(*self._coming_status)

    def _lost(self) -> None:
        self._responses.clear()
        self._finish(_CODE.UNAVAILABLE, "connection reset")

    def _finish(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        if self.done():
            return
        self._status = code, details, metadata
        self._node.sessions.pop(self, None)
        if self._wire is not None and not self._locally_cancelled:
            self._wire.close()
        if self._sender is not None:
            self._sender.cancel()
        self._changed.set()
        for callback in self._callbacks:
            callback(self)

    def _raise_unless_ok(self) -> None:
        assert self._status is not None
        code, details, metadata = self._status
        if self._locally_cancelled:
            raise asyncio.CancelledError
        if code is not _CODE.OK:
            trailing = grpc.aio.Metadata(*metadata)
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)


class UnaryCall:
    """Returns the response when awaited, or raises AioRpcError."""

    def __init__(self, call: SimCall, request: Any, timeout_s: float | None) -> None:
        self._call = call
        self._request = request
        self._timeout_s = timeout_s

    def __await__(self) -> Generator[Any, None, Any]:
        return self._run().__await__()

    async def _run(self) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.suppress(asyncio.InvalidStateError):  # refused: `read` says how
                    await self._call.write(self._request)
                return await self._call.read()
        except TimeoutError:
            none = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(_CODE.DEADLINE_EXCEEDED, none, none, details="Deadline Exceeded") from None
