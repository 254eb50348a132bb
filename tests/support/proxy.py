"""Provides a TCP proxy between processes on this machine, which can be told to fail, or to keep what passes.

Owns: the connections through it, and what happens to them by who dialled. Never: what they carry means.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Iterator

import psutil

from tests.support.pumps import until_either_ends

_CHUNK_BYTES = 64 << 10
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""For SO_LINGER: a close sends RST."""


class Fault(enum.Enum):
    STALL = "stall"
    """Nothing is read; what was under way arrives when the fault is over."""
    DROP = "drop"
    """Everything is read and lost, new connections too; what lost bytes is reset when the fault is over."""
    RESET = "reset"
    """Every connection is reset, also new ones."""


class Proxy:
    """Forwards connections on the event loop: `open` it, `aim` it, `close` it. `peers` names the processes that may
    dial."""

    def __init__(self, peers: Callable[[], Iterable[int]], *, keeps: bool = False) -> None:
        self.streams: list[bytearray] = []
        """What went through, each direction of each connection for itself, if it is to be kept."""
        self._keeps = keeps
        self._target = asyncio.Event()
        self._target_port = 0
        self._peers = peers
        self._faults: list[tuple[Fault, Callable[[], Collection[int]]]] = []
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def open(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = await asyncio.start_server(self._accept, host, port, limit=_CHUNK_BYTES)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in list(self._connections):
            connection.reset()
        await self._server.wait_closed()

    def aim(self, port: int | None) -> None:
        """Aims at a port of this machine; with None, whoever dials waits for the next."""
        if port is None:
            self._target.clear()
        else:
            self._target_port = port
            self._target.set()

    @contextlib.contextmanager
    def failing(self, fault: Fault, dialled_by: Callable[[], Collection[int]]) -> Iterator[None]:
        """While the context is open, what these processes dial fails; they are asked for at each connection."""
        entry = (fault, dialled_by)
        self._faults.append(entry)
        self._apply()
        try:
            yield
        finally:
            self._faults.remove(entry)
            self._apply()

    def _apply(self) -> None:
        owners = self._owners()
        for connection in list(self._connections):
            connection.suffer(self._fault_of(owners.get(connection.port, 0)))

    def _fault_of(self, pid: int) -> Fault | None:
        """Returns the fault that the process's connections suffer; pid 0 stands for a process that nobody knows."""
        return next((fault for fault, dialled_by in self._faults if pid and pid in dialled_by()), None)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer, self.streams if self._keeps else None)
        self._connections.add(connection)
        try:
            owner = self._owners().get(connection.port, 0) if self._faults else 0
            connection.suffer(self._fault_of(owner))
            await self._target.wait()
            await connection.run(reader, self._target_port)
        except OSError:
            pass  # either end went away, or there is none: the other end sees the same
        finally:
            self._connections.discard(connection)
            connection.reset()

    def _owners(self) -> dict[int, int]:
        """Pids by the ports they dialled from."""
        owners = {}
        for pid in self._peers():
            with contextlib.suppress(psutil.NoSuchProcess):
                for connection in psutil.Process(pid).net_connections(kind="tcp"):
                    owners[connection.laddr.port] = pid
        return owners


class _Connection:
    def __init__(self, client: asyncio.StreamWriter, streams: list[bytearray] | None) -> None:
        self.port = int(client.get_extra_info("peername")[1])
        """It was dialled from."""
        self._writers = [client]
        self._flowing = asyncio.Event()
        self._dropping = False
        self._streams = streams

    def suffer(self, fault: Fault | None) -> None:
        """Lets all connections suffer the fault; None ends it."""
        if fault is Fault.RESET or (fault is None and self._dropping):
            self.reset()
            return
        self._dropping = fault is Fault.DROP
        if fault is Fault.STALL:
            self._flowing.clear()
        else:
            self._flowing.set()

    def reset(self) -> None:
        for writer in self._writers:
            sock: socket.socket | None = writer.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()

    async def run(self, reader: asyncio.StreamReader, target: int) -> None:
        """Returns when either side has ended."""
        await self._flowing.wait()
        onward_reader, onward = await asyncio.open_connection("127.0.0.1", target, limit=_CHUNK_BYTES)
        self._writers.append(onward)
        await until_either_ends(self._pump(reader, onward), self._pump(onward_reader, self._writers[0]))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept = bytearray()
        if self._streams is not None:
            self._streams.append(kept)
        while data := await reader.read(_CHUNK_BYTES):
            if self._streams is not None:
                kept += data
            await self._flowing.wait()
            if not self._dropping:
                writer.write(data)
                await writer.drain()
