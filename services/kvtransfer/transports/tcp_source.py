"""Serves blocks to destinations that read them from a socket: the source's end of the tcp transport.

A thread serves each connection: it sends what was announced to the fetch that it is asked for, straight from the pool,
while the fetch goes on. Bytes may still leave in the moment in which a fetch ends; whoever has them then is refused the
Release, and has no use for them.

Owns: the listening socket, the connections and their threads. Never: which blocks are final, or who may fetch a lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from baton.v1 import kvtransfer_pb2, types_pb2
from services.core.addresses import join
from services.core.errors import TransferFailed
from services.core.listening import cannot_listen
from services.kv.lease import FetchTicket
from services.kv.regions import BlockMemory
from services.kvtransfer.checksums import checksums_of
from services.kvtransfer.transports import PROBE_BYTES, on_thread
from services.kvtransfer.transports.tcp import (
    ANSWER,
    GRANTED,
    GREETING,
    INTRODUCTION,
    MAGIC,
    NUM_CONNECTIONS,
    PROBE,
    REFUSED,
    REQUEST,
    Connection,
    Proofs,
    Stranger,
    is_right,
    new_nonce,
    prepare,
)
from services.kvtransfer.transports.tcp_tls import accepted_connection, require_secret
from services.rpc.certificates import Certificates

log = logging.getLogger(__name__)

LEAST_BYTES, MOST_BYTES = 16 << 20, 64 << 20
"""Between these are the bytes of blocks that one message announces, and one request asks for: each message takes both
ends a millisecond of processor time, whatever its size. A destination acknowledges it whole; as long as bytes
leave, the fetch does not stall."""
_SHARE = max(2, NUM_CONNECTIONS)
"""A message announces one part in this many of what is left, so that the connections of a destination on a host like
this one end together (guided self-scheduling, Polychronopoulos and Kuck 1987)."""
MAX_CONNECTIONS = 256
"""The most connections of destinations that have been let in, by token or certificate. Further ones are refused."""
MAX_STRANGERS = 32
"""The most connections that have not been let in yet. A further one takes the place of the oldest: whoever is of the
cluster shows so at once, and strangers that say nothing, or little, keep nobody out."""
IDLE_S = 120.0
"""How long a connection may ask for nothing. Destinations give theirs up sooner."""
_SILENCE_S = 5.0
_RETRY_ACCEPT_S = 1.0
_REFUSAL_LOG_EVERY_S = 10.0
_FLAG = "--kv-port"
_TOO_MANY = f"one more than {MAX_CONNECTIONS} connections"
_PROBED = b"\xa5" * PROBE_BYTES
"""What a probe brings, in memory of its own: zeros that nobody has written are one page, which never leaves the cache,
and sockets would seem faster than they are."""


class TcpSource:
    """Implements `SourceEnd`. It listens on the running event loop, from construction until `close`."""

    transport = types_pb2.TRANSPORT_TCP

    def __init__(
        self,
        memory: BlockMemory,
        reader: Executor,
        incarnation: int,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised_host: str = "",
        silence_s: float = _SILENCE_S,
        tls: Certificates | None = None,
    ) -> None:
        """`port` 0 takes a free one. `advertised_host` is where destinations reach `host`. With `tls` nothing passes
        but inside TLS, to peers whose certificates name a worker or a store; then `token` may be empty. Raises
        ConfigError if the port cannot be bound."""
        self._memory = memory
        self._tls = tls
        self._reader = reader
        self._fetches: dict[tuple[bytes, int], TcpAnnouncer] = {}
        self._server = _Server(self._find, incarnation, token, tls, host, port, silence_s)
        self.address = join(advertised_host or host, self._server.port)

    @property
    def description(self) -> str:
        return f"tcp ({self.address}{', TLS' if self._tls is not None else ''})"

    @property
    def num_connections(self) -> int:
        return self._server.num_connections

    def offer(self) -> types_pb2.KVOffer:
        return types_pb2.KVOffer(transport=self.transport, tcp_address=self.address, tcp_tls=self._tls is not None)

    def announcer(self, ticket: FetchTicket, *, checksums: bool) -> TcpAnnouncer:
        for key in [key for key, fetch in self._fetches.items() if fetch.over]:
            del self._fetches[key]
        announcer = TcpAnnouncer(self._memory, self._reader, ticket, checksums=checksums)
        self._fetches[ticket.lease.lease_id, ticket.leg] = announcer
        return announcer

    def close(self) -> None:
        """Ends all connections and waits for their threads. Afterwards nothing reads the pool."""
        self._server.close()

    def _find(self, lease_id: bytes, leg: int) -> TcpAnnouncer | None:
        return self._fetches.get((lease_id, leg))


class TcpAnnouncer:
    """Announces blocks by their number, and keeps which ones they are. Threads of connections read what it keeps."""

    def __init__(self, memory: BlockMemory, reader: Executor, ticket: FetchTicket, *, checksums: bool) -> None:
        self._memory = memory
        self._reader = reader
        self._ticket = ticket
        self._checksums = checksums
        self._announced: list[int] = []
        """The blocks announced, from the fetch's first."""
        self._fewest = max(1, LEAST_BYTES // memory.block_bytes)
        self._most = max(1, MOST_BYTES // memory.block_bytes)

    @property
    def over(self) -> bool:
        """Returns whether the leg has no use for the blocks any more: whatever it has, its Release is refused."""
        return not self._ticket.releasable

    def room(self, first_block: int, num_blocks: int) -> int:
        return min(num_blocks, self._most, max(self._fewest, num_blocks // _SHARE))

    async def announce(self, first_block: int, pool_blocks: Sequence[int]) -> kvtransfer_pb2.FetchBlocks:
        self._announced += pool_blocks
        read = partial(checksums_of, self._memory, pool_blocks)
        checksums = await on_thread(self._reader, read) if self._checksums else []
        return kvtransfer_pb2.FetchBlocks(first_block=first_block, num_blocks=len(pool_blocks), checksums=checksums)

    def blocks(self, first_block: int, num_blocks: int) -> list[int] | None:
        """Returns the pool's blocks of a part of what was announced; None if it was not, or the fetch is over."""
        start = first_block - self._ticket.first_block
        if self.over or start < 0 or not 0 < num_blocks <= min(self._most, len(self._announced) - start):
            return None
        return self._announced[start : start + num_blocks]

    def send(self, connection: Connection, pool_blocks: Sequence[int]) -> None:
        """Sends an answer with the blocks' bytes."""
        num_bytes = len(pool_blocks) * self._memory.block_bytes
        self._ticket.sending.add(connection)
        try:
            connection.send([ANSWER.pack(num_bytes, GRANTED), *self._memory.read_blocks(pool_blocks)])
        finally:
            self._ticket.sending.discard(connection)


class _Server:
    def __init__(
        self,
        find: Callable[[bytes, int], TcpAnnouncer | None],
        incarnation: int,
        token: str,
        tls: Certificates | None,
        host: str,
        port: int,
        silence_s: float,
    ) -> None:
        require_secret(token, tls)
        self._find = find
        self._incarnation = incarnation
        self._token = token
        self._tls = tls
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._serving: dict[threading.Thread, _Served] = {}
        self._lock = threading.Lock()
        """Held for changes of `_serving`, which threads make too, and to end a connection: its descriptor may be
        another's once it is closed."""
        self._closed = False
        self._retry: asyncio.TimerHandle | None = None
        self._num_refused = 0
        self._next_refusal_log_s = 0.0
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._loop.add_reader(self._listener, self._accept)

    @property
    def num_connections(self) -> int:
        return len(self._serving)

    def close(self) -> None:
        if self._closed:
            return
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        with self._lock:
            self._closed = True
            threads = list(self._serving)
            for served in self._serving.values():
                served.connection.interrupt()
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        try:
            accepted, peer = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # the peer has left again
            return
        except OSError as error:
            # The process is most likely out of descriptors. The listener would stay readable and keep the loop busy.
            log.warning("kv sockets: cannot accept: %s", error)
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(_RETRY_ACCEPT_S, self._loop.add_reader, self._listener, self._accept)
            return
        if not self._makes_room():
            accepted.close()
            self._refused(str(peer[0]), _TOO_MANY)
            return
        try:
            prepare(accepted)
            served = _Served(accepted_connection(accepted, self._silence_s, self._tls), str(peer[0]))
        except OSError:  # the peer has left again
            accepted.close()
            return
        thread = threading.Thread(target=self._serve, args=(served,), name="kv-tcp-source", daemon=True)
        try:
            with self._lock:  # which the thread takes when it ends
                thread.start()
                self._serving[thread] = served
        except RuntimeError as error:  # the process has no more threads
            served.connection.close()
            self._refused(served.who, str(error))

    def _makes_room(self) -> bool:
        """Ends the connection that has been a stranger longest, if there are too many. Returns whether there is room
        for a further one."""
        with self._lock:
            strangers = [served for served in self._serving.values() if not served.known and not served.ended]
            if self._is_full() or len(self._serving) >= MAX_CONNECTIONS + 2 * MAX_STRANGERS:
                return False
            for served in strangers[: max(0, len(strangers) - MAX_STRANGERS + 1)]:
                served.ended = True
                served.connection.interrupt()
                self._refused(served.who, f"one of more than {MAX_STRANGERS} that have not said who they are")
        return True

    def _is_full(self) -> bool:
        """Returns whether no further connection may be let in. With the lock."""
        return sum(served.known for served in self._serving.values()) >= MAX_CONNECTIONS

    def _refused(self, who: str, why: str) -> None:
        """Logs a refusal, at most one in `_REFUSAL_LOG_EVERY_S`: whoever is refused may come again and again."""
        self._num_refused += 1
        now = self._loop.time()
        if now >= self._next_refusal_log_s:
            self._next_refusal_log_s = now + _REFUSAL_LOG_EVERY_S
            log.warning("kv sockets: refused %s: %s (%d refused so far)", who, why, self._num_refused)

    # -- on a connection's thread --------------------------------------------------------------------------------------

    def _serve(self, served: _Served) -> None:
        try:
            served.connection.establish()
            self._know(served)
            while (data := served.connection.receive(REQUEST.size, patience_s=IDLE_S)) is not None:
                self._answer(served.connection, *REQUEST.unpack(data))
        except Stranger as error:
            self._from_thread(self._refused, served.who, str(error))
        except TransferFailed as error:
            log.debug("kv sockets: %s: %s", served.who, error)
        except Exception:
            log.exception("internal error (kv socket)")
        finally:
            with self._lock:
                served.connection.close()
                self._serving.pop(threading.current_thread(), None)

    def _know(self, served: _Served) -> None:
        """Exchanges proofs. Raises Stranger unless the peer gives the right one and there is room for it among those
        that have; it gets this worker's only then."""
        nonce = new_nonce()
        served.connection.send([GREETING.pack(MAGIC, self._incarnation, nonce)])
        introduction = served.connection.receive(INTRODUCTION.size)
        if introduction is None:
            raise TransferFailed("it has left")
        peer_nonce, proof = INTRODUCTION.unpack(introduction)
        proofs = Proofs.of(self._token, self._incarnation, nonce, peer_nonce)
        if not is_right(proof, proofs.destination):
            raise Stranger("it does not show the cluster token")
        # Before the proof leaves: whoever has it may connect again at once, and is one of those that were let in.
        with self._lock:
            if self._is_full():
                raise Stranger(_TOO_MANY)
            served.known = True
        served.connection.send([proofs.source])

    def _answer(self, connection: Connection, lease_id: bytes, leg: int, first_block: int, num_blocks: int) -> None:
        if lease_id == PROBE:
            num_bytes = min(num_blocks << 10, len(_PROBED))
            connection.send([ANSWER.pack(num_bytes, GRANTED), memoryview(_PROBED)[:num_bytes]])
            return
        fetch = self._find(lease_id, leg)
        pool_blocks = fetch.blocks(first_block, num_blocks) if fetch is not None else None
        if fetch is None or pool_blocks is None:
            connection.send([ANSWER.pack(0, REFUSED)])
            return
        fetch.send(connection, pool_blocks)

    def _from_thread(self, act: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(act, *arguments)


@dataclass(slots=True)
class _Served:
    connection: Connection
    who: str
    known: bool = False
    """Whether it has shown the token, if there is one, and with TLS a certificate."""
    ended: bool = False
    """Whether it had to go for a newer stranger."""


def _listen(host: str, port: int) -> socket.socket:
    bare = host.strip("[]")
    try:
        family, *_, address = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise cannot_listen(_FLAG, host, port, error) from error
    listener.setblocking(False)
    return listener
