"""Simulates the sockets that blocks are read from: a connection only carries, between the code of its two real ends.

Bytes are taken from the source's pool as they leave, and written straight into the destination's pool, in parts.
Between two parts time passes: the fetch may end meanwhile, blocks may get other owners, and the connection may break.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from baton.v1 import types_pb2
from services.core.errors import StaleIncarnation, TransferFailed
from services.kv.pool import Holder
from services.kv.regions import Buffer
from services.kvtransfer.transports.tcp import REQUEST, Connection
from services.kvtransfer.transports.tcp_destination import TcpDestination, TcpUnavailable
from services.kvtransfer.transports.tcp_source import TcpSource, _Server
from tests.sim import strand
from tests.sim.loop import NodeLoop
from tests.sim.memory import SimMemory
from tests.sim.network import Network
from tests.sim.node import Node

_NOTICE_S = 0.0005


class Sockets:
    """Keeps all sockets from which blocks can be read, by their addresses."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.sources: dict[str, SimTcpSource] = {}


class SimTcpSource(TcpSource):
    """The real source's end; only the listening socket and its threads are simulated."""

    def __init__(
        self, sockets: Sockets, node: Node, memory: SimMemory, reader: Executor, incarnation: int, host: str
    ) -> None:
        self._tls = None
        self._memory = memory
        self._pool = memory.pool
        self._reader = reader
        self._fetches = {}
        self.node = node
        self.incarnation = incarnation
        self.address = f"{host}:7000"
        self.connections: dict[SimConnection, None] = {}
        self._sockets = sockets
        self._server = _Server.__new__(_Server)
        self._server._find = self._find
        sockets.sources[self.address] = self
        node.on_death.append(self.close)

    @property
    def is_up(self) -> bool:
        return self._sockets.sources.get(self.address) is self

    def answer(self, connection: Any, request: bytes) -> None:
        """Answers as the thread of a connection does. What it grants is leased in that moment."""
        lease_id, leg, first_block, num_blocks = REQUEST.unpack(request)
        fetch = self._find(lease_id, leg)
        for block_id in (fetch.blocks(first_block, num_blocks) if fetch is not None else None) or ():
            leased = self._pool.references(Holder.LEASE, block_id)
            self.node.world.require(leased, f"{self.node.name} sends block {block_id}, which nobody has leased")
        self._server._answer(connection, *REQUEST.unpack(request))

    def close(self) -> None:
        if self.is_up:
            del self._sockets.sources[self.address]
            for connection in self.connections:
                self._sockets.network.world.after(_NOTICE_S, connection.hang_up)


class SimTcpDestination(TcpDestination):
    """The real destination's end, with one connection for each fetch, whose copies take turns."""

    def __init__(self, sockets: Sockets, node: Node, thread: Executor, part_s: Callable[[], float]) -> None:
        """`part_s` returns how long a part of a block is on its way."""
        self._sockets = sockets
        self._node = node
        self._part_s = part_s
        self._tls = None
        self._num_connections = 1
        self._idle = {}
        self._closed = False
        self._timeout_s = 2.0
        self.threads = thread

    async def _dial(self, source: types_pb2.KVSource, address: str) -> Connection:
        answering = self._sockets.sources.get(address)
        if answering is None:
            raise TcpUnavailable(f"socket at {address}: connection refused")
        network, loop = self._sockets.network, asyncio.get_running_loop()
        answered = loop.create_future()

        def answer() -> None:
            if answering.node.running and not network.is_cut(answering.node, self._node):
                loop.call_soon_threadsafe(lambda: answered.done() or answered.set_result(None))

        network.world.after(2 * network.delay_s(self._node, answering.node), answer)
        try:
            async with asyncio.timeout(self._timeout_s):
                await answered
        except TimeoutError:
            raise TcpUnavailable(f"socket at {address}: no answer") from None
        if answering.incarnation != source.incarnation:
            raise StaleIncarnation("the source has restarted: another process answers at its socket")
        connection: Any = SimConnection(network, self._node, answering, self._part_s)
        return connection  # type: ignore[no-any-return]

    async def probe(self, source: types_pb2.KVSource, offer: types_pb2.KVOffer) -> float:
        return 2e9


class SimConnection:
    """Stands for a `Connection` at its destination. What was asked for is answered when it is read."""

    def __init__(self, network: Network, node: Node, source: SimTcpSource, part_s: Callable[[], float]) -> None:
        self._network = network
        self._node = node
        self._source = source
        self._part_s = part_s
        self._requests: list[bytes] = []
        self._arrived = bytearray()
        """Bytes that the destination has not read yet."""
        self._broken = False
        self._watcher: tuple[NodeLoop, Callable[[], None]] | None = None
        source.connections[self] = None

    def send(self, buffers: Sequence[Buffer]) -> None:
        self._require_up()
        self._requests.append(b"".join(bytes(buffer) for buffer in buffers))

    def receive(self, num_bytes: int, *, patience_s: float | None = None) -> bytes | None:
        data = bytearray(num_bytes)
        return bytes(data) if self.receive_into([memoryview(data)]) else None

    def receive_into(self, views: Sequence[memoryview], *, patience_s: float | None = None) -> bool:
        for view in views:
            half = len(view) // 2
            for part in (view[:half], view[half:]):
                strand.wait(self._part_s())
                self._require_up()
                if not self._arrived and self._requests:
                    self._source.answer(_Answering(self), self._requests.pop(0))
                if len(self._arrived) < len(part):
                    raise TransferFailed("the other end is silent")
                part[:], self._arrived = self._arrived[: len(part)], self._arrived[len(part) :]
        return True

    def interrupt(self) -> None:
        self._broken = True

    def is_quiet(self) -> bool:
        return not (self._broken or self._arrived or self._requests) and self._source.is_up

    def leave_loop(self) -> None:
        pass

    def close(self) -> None:
        self._broken = True
        self._source.connections.pop(self, None)

    def watch(self, loop: NodeLoop, callback: Callable[[], None]) -> None:
        self._watcher = loop, callback

    def unwatch(self) -> bool:
        watched, self._watcher = self._watcher is not None, None
        return watched

    def hang_up(self) -> None:
        if self._watcher is not None:
            loop, callback = self._watcher
            loop.call_soon(lambda: callback() if self._watcher is not None else None)

    def arrive(self, buffer: Buffer) -> None:
        """Takes bytes of the source's, as they are when they leave: the later ones later."""
        view = memoryview(buffer).cast("B")
        half = len(view) // 2
        for part in (view[:half], view[half:]):
            self._require_up()
            self._arrived += part
            strand.wait(self._part_s())

    def _require_up(self) -> None:
        if self._broken:
            raise TransferFailed("the connection was given up")
        if not self._source.is_up:
            raise TransferFailed("the connection ended within a message")
        if self._source.node.frozen or self._network.is_cut(self._source.node, self._node):
            raise TransferFailed("the other end is silent")


class _Answering:
    """Stands for a `Connection` at its source."""

    def __init__(self, connection: SimConnection) -> None:
        self._connection = connection

    def send(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self._connection.arrive(buffer)
