"""Simulates shared memory between workers of one host: mappings of other nodes' `SimMemory`, or of its staging slots.

A mapping shows the bytes as they are, also when their owner is dead, as a mapped memfd does; the connection beside it
tells that the owner has gone. The real `MappingCache` decides what to do about that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from baton.v1 import types_pb2
from services.kvtransfer.transports.shm import default_socket_name
from services.kvtransfer.transports.shm_mapping import Mapping, MappingCache, ShmUnavailable
from tests.sim.loop import NodeLoop
from tests.sim.memory import SimMemory, SimStagingArea
from tests.sim.node import Node
from tests.sim.world import World

_NOTICE_S = 0.0005


class SharedMemory:
    """Keeps all sockets that hand out memory."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.servers: dict[str, SimShmServer] = {}


class SimShmServer:
    """Stands for `ShmServer`."""

    def __init__(self, shared: SharedMemory, node: Node, memory: SimMemory | SimStagingArea, incarnation: int) -> None:
        self.name = default_socket_name(incarnation)
        self.node = node
        self.memory = memory
        self.connections: dict[Connection, None] = {}
        self._shared = shared
        shared.servers[self.name] = self
        node.on_death.append(self.close)

    def close(self) -> None:
        self._shared.servers.pop(self.name, None)
        for connection in list(self.connections):
            self._shared.world.after(_NOTICE_S, connection.hang_up)
        self.connections.clear()


class Connection:
    """The client's end of the socket; the server's end closes with its process."""

    def __init__(self, server: SimShmServer) -> None:
        self._server = server
        self._watcher: tuple[NodeLoop, Callable[[], None]] | None = None
        server.connections[self] = None

    def watch(self, loop: NodeLoop, callback: Callable[[], None]) -> None:
        self._watcher = loop, callback

    def unwatch(self) -> bool:
        watched, self._watcher = self._watcher is not None, None
        return watched

    def close(self) -> None:
        self._server.connections.pop(self, None)

    def hang_up(self) -> None:
        if self._watcher is not None:
            loop, callback = self._watcher
            # Once readable it is until someone looks.
            loop.call_soon(lambda: callback() if self._watcher is not None else None)


class SimMapping(Mapping):
    def __init__(self, server: SimShmServer) -> None:
        self.num_blocks = server.memory.num_blocks
        self.connection = _any(Connection(server))
        self._block_bytes = server.memory.block_bytes
        self._map = _any(_Map())
        self._view = memoryview(server.memory.bytes)
        self._num_pins = 0
        self._dropped = False


class _Map:
    closed = False

    def close(self) -> None:
        self.closed = True


class SimMappingCache(MappingCache):
    """The real cache; only the system calls are simulated."""

    def __init__(self, shared: SharedMemory, block_bytes: int) -> None:
        super().__init__(block_bytes)
        self._shared = shared

    async def probe(self, source: types_pb2.KVSource, offer: types_pb2.KVOffer) -> float:
        return 8e9

    async def _map(self, source: types_pb2.KVSource, name: str) -> Mapping:
        server = self._shared.servers.get(name)
        if server is None:
            raise ShmUnavailable(f"shared memory at {name}: connection refused")
        loop = asyncio.get_running_loop()
        accepted = loop.create_future()
        # The other side's event loop accepts: a frozen one does not.
        server.node.loop.call_soon(
            lambda: loop.call_soon_threadsafe(lambda: accepted.done() or accepted.set_result(None))
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                await accepted
        except TimeoutError:
            raise ShmUnavailable(f"shared memory at {name}: no answer") from None
        if name not in self._shared.servers:
            raise ShmUnavailable(f"shared memory at {name}: reset")
        return SimMapping(server)


def _any(value: object) -> Any:
    return value
