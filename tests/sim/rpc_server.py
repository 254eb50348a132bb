"""Implements what grpc.aio offers to servicers: a server, its contexts and request streams, over the simulated network.

Handlers run behind the real `ErrorInterceptor`, registered by the generated code. Never: what a servicer does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from types import SimpleNamespace
from typing import Any

import grpc

from services.rpc.interceptors import ErrorInterceptor
from tests.sim.network import Network, Wire
from tests.sim.node import Node


class SimServer:
    """Stands for `rpc.serving.GrpcServer`, and for the `grpc.aio.Server` inside it."""

    def __init__(self, node: Node, network: Network) -> None:
        self.node = node
        self._network = network
        self._interceptor = ErrorInterceptor()
        self._handlers: dict[str, Any] = {}
        self._guarded: dict[str, Any] = {}
        self._calls: dict[Call, None] = {}
        self._stopping = False
        self.address = node.address
        self.port = int(node.address.rpartition(":")[2])
        self.host = node.address.rpartition(":")[0]

    # As GrpcServer.

    def add(self, service: str, register: Any, servicer: object) -> None:
        register(servicer, self)

    async def start(self) -> None:
        self._network.servers[self.address] = self
        self.node.on_death.append(self._forget)

    async def set_ready(self, ready: bool, *services: str) -> None:
        pass

    async def stop(self, grace_s: float = 0.0) -> None:
        self._forget()
        self._stopping = True
        tasks = [call.task for call in self._calls if call.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # As grpc.aio.Server.

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for method, handler in handlers.items():
            self._handlers[f"/{service}/{method}"] = handler

    def _forget(self) -> None:
        if self._network.servers.get(self.address) is self:
            del self._network.servers[self.address]

    def accept(self, method: str, wire: Wire) -> None:
        """A call has arrived; on the server's loop."""
        call = Call(method, wire)
        if self._stopping:
            call.end(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
            return
        self._calls[call] = None
        if method.endswith("/Session"):
            self.node.sessions[call] = None
        call.task = self.node.loop.create_task(self._serve(call), name=f"serve {method}")
        call.task.add_done_callback(lambda task: self._over(call, task))

    def _over(self, call: Call, task: asyncio.Task[None]) -> None:
        del self._calls[call]
        self.node.sessions.pop(call, None)
        if self.node.alive and not task.cancelled() and (error := task.exception()) is not None:
            self.node.world.fail(error)

    async def _serve(self, call: Call) -> None:
        guarded = await self._handler(call.method)
        if guarded is None:
            call.end(grpc.StatusCode.UNIMPLEMENTED, call.method)
            return
        call.serializer, call.deserializer = guarded.response_serializer, guarded.request_deserializer
        try:
            if guarded.request_streaming:
                await guarded.stream_stream(call, call)
            elif guarded.response_streaming:
                await guarded.unary_stream(await anext(call), call)
            else:
                response = await guarded.unary_unary(await anext(call), call)
                if call.failed:
                    call.end_as_set()
                    return
                if self.node.world.chance(self._network.lossy.get(self.node.name, 0.0)):
                    self.node.world.note("reply lost", self.node.name, call.method)
                    call.wire.break_off()
                    return
                await call.write(response)
            call.end_as_set()
        except asyncio.CancelledError:
            call.end(grpc.StatusCode.CANCELLED, "cancelled by the server")
            raise
        except (StopAsyncIteration, grpc.aio.BaseError):
            call.end(grpc.StatusCode.UNKNOWN, "the client is gone")

    async def _handler(self, method: str) -> Any:
        if method not in self._guarded:

            async def found(_: Any) -> Any:
                return self._handlers.get(method)

            details: Any = SimpleNamespace(method=method)
            self._guarded[method] = await self._interceptor.intercept_service(found, details)
        return self._guarded[method]


class Call:
    """Is one RPC at its server: the servicer context and the request stream in one."""

    def __init__(self, method: str, wire: Wire) -> None:
        self.method = method
        self.task: asyncio.Task[None] | None = None
        self.serializer: Any = None
        self.deserializer: Any = None
        self.wire = wire
        self._requests: deque[bytes] = deque()
        self._half_closed = False
        self._over = False
        self._metadata_sent = False
        self._status: tuple[grpc.StatusCode, str, Any] = (grpc.StatusCode.OK, "", ())
        self._arrived = asyncio.Event()
        self.held_leases: frozenset[bytes] = frozenset()
        """What the router's newest heartbeat lists."""
        self.router_incarnation = 0
        self.heard_s = wire.network.world.now_s
        wire.up.receiver = self._received
        wire.server_lost = self._lost

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        while not self._requests:
            if self._half_closed or self._over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        data = self._requests.popleft()
        self.wire.up.was_read()
        request = self.deserializer(data)
        if self.method.endswith("/Session"):
            self._note(request)
            if self._is_lost(request):
                return await self.__anext__()
        return request

    def _is_lost(self, request: Any) -> bool:
        node = self.wire.server
        if not node.num_commands_to_lose or request.WhichOneof("message") not in ("prefill", "decode", "cancel"):
            return False
        node.num_commands_to_lose -= 1
        node.world.note("command lost", node.name, request.WhichOneof("message"))
        return True

    def _note(self, request: Any) -> None:
        """Tells whoever watches from outside."""
        match request.WhichOneof("message"):
            case "hello":
                self.router_incarnation = request.hello.router_incarnation
            case "heartbeat":
                self.held_leases = frozenset(request.heartbeat.held_leases)

    async def send_initial_metadata(self, metadata: Any) -> None:
        if not self._metadata_sent:
            self._metadata_sent = True
            self.wire.down.send(("metadata",))

    async def write(self, response: Any) -> None:
        if self._over:
            raise grpc.aio.UsageError("the call is over")
        await self.send_initial_metadata(())
        await self.wire.down.send_message(("message", self.serializer(response)))

    @property
    def failed(self) -> bool:
        return self._status[0] is not grpc.StatusCode.OK

    def set_code(self, code: grpc.StatusCode) -> None:
        self._status = (code, *self._status[1:])

    def set_details(self, details: str) -> None:
        self._status = (self._status[0], details, self._status[2])

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._status = (*self._status[:2], metadata)

    def end_as_set(self) -> None:
        """Ends the call as the context was told, when the handler has returned."""
        self.end(*self._status)

    def end(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        if not self._over:
            self._over = True
            self.wire.down.send(("status", code, details, tuple(trailing_metadata)))

    def _received(self, packet: tuple[Any, ...]) -> None:
        self.heard_s = self.wire.network.world.now_s
        match packet[0]:
            case "message":
                self._requests.append(packet[1])
            case "half_close":
                self._half_closed = True
            case "cancel":
                self.wire.close()
                self._lost()
        self._arrived.set()

    def _lost(self) -> None:
        """The client has gone: grpc.aio cancels the handler."""
        self._over = True
        self._arrived.set()
        if self.task is not None:
            with contextlib.suppress(asyncio.InvalidStateError):
                self.task.cancel()
