"""Reads blocks from other workers' sockets: the destination's end of the tcp transport.

A fetch has a few connections to its source for itself, and two copies at once on each: one is read, straight into the
pool, while the source already knows what comes next. Connections that a fetch has no more use for are kept for the next
one. One in the middle of a message is closed, and only then can nothing write the blocks any more.

Owns: the connections, and the threads that read on them. Never: which blocks are fetched, or when.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Sequence
from concurrent.futures import Executor

from baton.v1 import types_pb2
from services.core.addresses import parse
from services.core.clock import Clock, MonotonicClock, timeout_after
from services.core.daemon_threads import DaemonThreads
from services.core.errors import ProtocolViolation, StaleIncarnation, TransferFailed
from services.kv.regions import BlockMemory
from services.kvtransfer.transports import PROBE_BYTES, FetchName, TransportUnavailable, fastest_s
from services.kvtransfer.transports.tcp import (
    ANSWER,
    GRANTED,
    GREETING,
    INTRODUCTION,
    MAGIC,
    NUM_CONNECTIONS,
    PROBE,
    PROOF_BYTES,
    REQUEST,
    Connection,
    Proofs,
    Stranger,
    is_right,
    new_nonce,
    prepare,
)
from services.kvtransfer.transports.tcp_tls import (
    TlsConnection,
    once_ready,
    reason_of,
    require_peer,
    require_secret,
    wrap_dialled,
)
from services.kvtransfer.wire import Announced
from services.rpc.certificates import Certificates

_NUM_ASKED = 2
"""How many copies there may be on a connection at once: while one comes, the source knows what comes next."""
_IDLE_S = 60.0


class TcpUnavailable(TransportUnavailable):
    """Says that the source's socket cannot be used from here."""


class TcpDestination:
    """Implements `DestinationEnd`: keeps the connections by source incarnation. Event loop only."""

    transport = types_pb2.TRANSPORT_TCP

    def __init__(
        self,
        token: str,
        *,
        clock: Clock | None = None,
        timeout_s: float = 2.0,
        silence_s: float = 5.0,
        num_connections: int = NUM_CONNECTIONS,
        tls: Certificates | None = None,
    ) -> None:
        """`clock` keeps awake time, by which sources are judged. `timeout_s` bounds the time to connect and to be
        known; `silence_s` that in which a source sends nothing of what it was asked for. With `tls` blocks are read
        inside TLS alone, from sources whose certificates name a worker or a store; then `token` may be empty."""
        require_secret(token, tls)
        self._token = token
        self._tls = tls
        self._clock = clock or MonotonicClock()
        self._timeout_s = timeout_s
        self._silence_s = silence_s
        self._num_connections = num_connections
        self._idle: dict[int, dict[Connection, asyncio.TimerHandle]] = {}
        self.threads: Executor = DaemonThreads(None, "kv-tcp")
        self._closed = False

    @property
    def num_idle(self) -> int:
        return sum(map(len, self._idle.values()))

    async def connect(self, source: types_pb2.KVSource, offer: types_pb2.KVOffer, fetch: FetchName) -> TcpCopier:
        if offer.tcp_tls != (self._tls is not None):
            theirs, ours = ("TLS", "in clear") if offer.tcp_tls else ("in clear", "TLS")
            raise TcpUnavailable(f"socket at {offer.tcp_address}: it is {theirs}, and this worker's sockets are {ours}")
        connections = self._take(source.incarnation)
        dials = [
            asyncio.create_task(self._dial(source, offer.tcp_address), name="kv-tcp-dial")
            for _ in range(self._num_connections - len(connections))
        ]
        try:
            connections += await asyncio.gather(*dials)
        except BaseException:
            for dial in dials:
                dial.cancel()
            made = await asyncio.gather(*dials, return_exceptions=True)
            for connection in (*connections, *made):
                if isinstance(connection, Connection):
                    connection.close()
            raise
        return TcpCopier(self, source.incarnation, fetch, connections)

    async def probe(self, source: types_pb2.KVSource, offer: types_pb2.KVOffer) -> float:
        copier = await self.connect(source, offer, FetchName(PROBE, 0))
        copier.pin()
        loop = asyncio.get_running_loop()
        try:
            probing = self.threads.submit(copier.probe)
        except RuntimeError:  # there is no thread for it
            copier.unpin()
            raise
        # A connection that was closed while its thread is in a call could be another one for the rest of that call.
        probing.add_done_callback(lambda _: loop.call_soon_threadsafe(copier.unpin))
        try:
            return PROBE_BYTES / await asyncio.wrap_future(probing)
        except asyncio.CancelledError:
            copier.stop()
            raise

    def close(self) -> None:
        """Closes the connections, and ends the threads."""
        self._closed = True
        for incarnation, connections in list(self._idle.items()):
            for connection in list(connections):
                self._drop(incarnation, connection)
        self.threads.shutdown()

    def give_back(self, incarnation: int, connection: Connection) -> None:
        """Takes back a connection that is between two messages, for another fetch."""
        if self._closed:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        expiry = loop.call_later(_IDLE_S, self._drop, incarnation, connection)
        self._idle.setdefault(incarnation, {})[connection] = expiry
        # It is readable only when the source is gone, or does what it must not.
        loop.add_reader(connection, self._drop, incarnation, connection)

    def _take(self, incarnation: int) -> list[Connection]:
        taken: list[Connection] = []
        for connection in list(self._idle.get(incarnation, ()))[: self._num_connections]:
            self._forget(incarnation, connection)
            if connection.is_quiet():
                taken.append(connection)
            else:
                connection.close()
        return taken

    def _drop(self, incarnation: int, connection: Connection) -> None:
        self._forget(incarnation, connection)
        connection.close()

    def _forget(self, incarnation: int, connection: Connection) -> None:
        idle = self._idle[incarnation]
        idle.pop(connection).cancel()
        if not idle:
            del self._idle[incarnation]
        asyncio.get_running_loop().remove_reader(connection)
        connection.leave_loop()

    async def _dial(self, source: types_pb2.KVSource, address: str) -> Connection:
        loop, dialled = asyncio.get_running_loop(), None
        try:
            async with timeout_after(self._timeout_s, self._clock):
                host, port = parse(address)
                family, *_, resolved = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
                dialled = socket.socket(family, socket.SOCK_STREAM)
                dialled.setblocking(False)
                await loop.sock_connect(dialled, resolved)
                prepare(dialled)
                if self._tls is None:
                    await self._introduce(source, address, dialled)
                    return Connection(dialled, self._silence_s)
                dialled = wrap_dialled(self._tls, dialled)
                await _shake_hands(dialled, address)
                await self._introduce(source, address, dialled)
                return TlsConnection(dialled, self._silence_s)
        except BaseException as error:
            if dialled is not None:
                dialled.close()
            if isinstance(error, OSError | TimeoutError | ValueError):
                why = reason_of(error) if isinstance(error, OSError) else str(error)
                raise TcpUnavailable(f"socket at {address}: {why}") from error
            raise

    async def _introduce(self, source: types_pb2.KVSource, address: str, dialled: socket.socket) -> None:
        """Exchanges proofs with the source. Raises ProtocolViolation if it does not have the token, or is no worker."""
        nonce = new_nonce()
        magic, incarnation, source_nonce = GREETING.unpack(await _read(dialled, GREETING.size))
        if magic != MAGIC:
            raise ProtocolViolation(f"{address} is no socket of a worker's blocks")
        if incarnation != source.incarnation:
            raise StaleIncarnation("the source has restarted: another process answers at its socket")
        proofs = Proofs.of(self._token, incarnation, source_nonce, nonce)
        # It always fits into what the kernel takes of a new connection.
        await once_ready(dialled, lambda: dialled.send(INTRODUCTION.pack(nonce, proofs.destination)))
        if not is_right(await _read(dialled, PROOF_BYTES), proofs.source):
            raise ProtocolViolation(f"who answers at {address} does not have the cluster token")


class TcpCopier:
    """Implements `Copier`, over connections that are this fetch's own."""

    transport = types_pb2.TRANSPORT_TCP
    carried = False

    def __init__(
        self, end: TcpDestination, incarnation: int, fetch: FetchName, connections: Sequence[Connection]
    ) -> None:
        self.threads: Executor = end.threads
        self.num_copies = _NUM_ASKED * len(connections)
        self._end = end
        self._incarnation = incarnation
        self._fetch = fetch
        self._lines = [_Line(connection) for connection in connections]
        self._num_pins = 0
        self._stopped = False

    def count(self, message: Announced) -> int:
        if message.num_blocks < 0:
            raise ProtocolViolation(f"announced {message.num_blocks} blocks")
        return message.num_blocks

    def copy(self, message: Announced, memory: BlockMemory, targets: Sequence[int]) -> None:
        memory.fill_blocks(targets, lambda views: self._read(message.first_block, views))

    def stop(self) -> None:
        self._stopped = True
        for line in self._lines:
            line.stop()

    def pin(self) -> None:
        self._num_pins += 1

    def unpin(self) -> None:
        self._num_pins -= 1
        if self._num_pins == 0:
            for line in self._lines:
                if line.is_free:
                    self._end.give_back(self._incarnation, line.connection)
                else:
                    line.connection.close()

    # -- on threads ----------------------------------------------------------------------------------------------------

    def probe(self) -> float:
        """Returns how many seconds `PROBE_BYTES` take."""
        scratch, request = memoryview(bytearray(PROBE_BYTES)), REQUEST.pack(PROBE, 0, 0, PROBE_BYTES >> 10)
        return fastest_s(lambda: self._lines[0].read(request, [scratch]))

    def _read(self, first_block: int, views: Sequence[memoryview]) -> None:
        request = REQUEST.pack(self._fetch.lease_id, self._fetch.leg, first_block, len(views))
        if self._stopped:
            raise TransferFailed("the fetch was given up")
        min(self._lines, key=lambda line: line.num_asked).read(request, views)


class _Line:
    """Carries the copies of one connection: all are asked for at once, and each is read by its thread in its turn."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._turn = threading.Condition()
        """Held for changes of what is below, and to send a request."""
        self._num_begun = 0
        self._num_ended = 0
        self._broken = False
        """Whether nothing more can be read, since a message was not read to its end, or is not to be."""

    @property
    def num_asked(self) -> int:
        """Returns how many copies are under way."""
        return self._num_begun - self._num_ended

    @property
    def is_free(self) -> bool:
        """Returns whether the connection is between two messages."""
        return not self.num_asked and not self._broken

    def stop(self) -> None:
        """Ends the copies under way. It does not wait for a thread."""
        if self.num_asked:
            self._broken = True
            self.connection.interrupt()

    def read(self, request: bytes, views: Sequence[memoryview]) -> None:
        """Asks for blocks and reads them into the views. Raises TransferFailed or ProtocolViolation."""
        try:
            with self._turn:
                place, self._num_begun = self._num_begun, self._num_begun + 1
                self._require_whole()
                self.connection.send([request])
                self._turn.wait_for(lambda: self._num_ended == place or self._broken)
                self._require_whole()
            self._receive(views)
        except BaseException:
            self._broken = True
            self.connection.interrupt()
            raise
        finally:
            with self._turn:
                self._num_ended += 1
                self._turn.notify_all()

    def _require_whole(self) -> None:
        if self._broken:
            raise TransferFailed("the connection was given up")

    def _receive(self, views: Sequence[memoryview]) -> None:
        answer = self.connection.receive(ANSWER.size)
        if answer is None:
            raise TransferFailed("the source has closed the connection")
        granted_bytes, status = ANSWER.unpack(answer)
        if status != GRANTED:
            raise TransferFailed("the source does not give the blocks that it has announced")
        if granted_bytes != (num_bytes := sum(view.nbytes for view in views)):
            raise ProtocolViolation(f"{granted_bytes} bytes for blocks of {num_bytes}")
        if not self.connection.receive_into(views):
            raise TransferFailed("the source has closed the connection")


async def _shake_hands(dialled: ssl.SSLSocket, address: str) -> None:
    """Raises ProtocolViolation if who answers is not one of the cluster's, and OSError if there is no handshake."""
    try:
        await once_ready(dialled, dialled.do_handshake)
        require_peer(dialled)
    except ssl.SSLCertVerificationError as error:
        raise ProtocolViolation(f"who answers at {address} is refused: {reason_of(error)}") from error
    except Stranger as error:
        raise ProtocolViolation(f"who answers at {address} is refused: {error}") from error


async def _read(dialled: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = await once_ready(dialled, lambda: dialled.recv(num_bytes - len(data)))  # noqa: B023
        if not part:
            raise ConnectionError("it was refused")
        data += part
    return data
