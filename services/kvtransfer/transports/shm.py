"""Hands a memfd, a pool's or its staging area's, to destinations on the same host.

Owns: the Unix socket, its connections and a read-only handle of the memfd. A connection stays open as long as its
peer maps the pool, so that the peer learns at once when this process is gone. Never: the pool; a named segment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from baton.v1 import kvtransfer_pb2
from services.core.errors import ConfigError
from services.kv.regions import BlockMemory
from services.kvtransfer.checksums import checksums_of
from services.kvtransfer.transports import on_thread

log = logging.getLogger(__name__)

GREETING = struct.Struct("<8sQQQ")
"""The message sent with the descriptor: magic, incarnation, block_bytes, num_blocks."""
MAGIC = b"baton-kv"

MESSAGE_BYTES = 16 << 20
"""The most bytes of blocks that one message announces. It bounds the time of a single copy, for which a cancelled
import must wait."""
_PEER_CREDENTIALS = struct.Struct("3i")
_RETRY_ACCEPT_S = 1.0
_REFUSAL_LOG_EVERY_S = 10.0
MAX_CONNECTIONS = 256
"""The most connections; each worker of this host that fetches here has one. Further ones are refused, and fetch by
another transport."""


def socket_address(name: str) -> str:
    """Returns what `socket.bind` and `connect` take: a path or, for a leading '@', a name in the abstract namespace."""
    return "\0" + name[1:] if name.startswith("@") else name


def default_socket_name(incarnation: int) -> str:
    return f"@baton-{incarnation:016x}"


class PoolAnnouncer:
    """Announces blocks of a pool that destinations read themselves, by their ids in the pool."""

    def __init__(self, memory: BlockMemory, reader: Executor, *, checksums: bool) -> None:
        self._memory = memory
        self._reader = reader
        self._checksums = checksums
        self._blocks_per_message = max(1, MESSAGE_BYTES // memory.block_bytes)

    def room(self, first_block: int, num_blocks: int) -> int:
        return min(num_blocks, self._blocks_per_message)

    async def announce(self, first_block: int, pool_blocks: Sequence[int]) -> kvtransfer_pb2.FetchBlocks:
        read = partial(checksums_of, self._memory, pool_blocks)
        checksums = await on_thread(self._reader, read) if self._checksums else []
        return kvtransfer_pb2.FetchBlocks(first_block=first_block, pool_blocks=pool_blocks, checksums=checksums)


class ShmServer:
    """Listens on the running event loop, from construction until `close`. It serves processes of the same user only.

    Raises ConfigError if the socket cannot be bound.
    """

    def __init__(self, memory: BlockMemory, incarnation: int, name: str | None = None) -> None:
        assert memory.fd is not None, "this pool cannot be mapped"
        self.name = name or default_socket_name(incarnation)
        self._greeting = GREETING.pack(MAGIC, incarnation, memory.block_bytes, memory.num_blocks)
        self._loop = asyncio.get_running_loop()
        self._connections: set[socket.socket] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._num_refused = 0
        self._next_refusal_log_s = 0.0
        self._listener = _listen(self.name)
        # A descriptor opened read-only cannot be mapped writable, whoever has it.
        self._pool_fd = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._loop.add_reader(self._listener, self._accept)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        """Closes the connections, so that peers drop their mappings, and removes the socket."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        for connection in list(self._connections):
            self._hang_up(connection)
        self._listener.close()
        os.close(self._pool_fd)
        if not self.name.startswith("@"):
            Path(self.name).unlink(missing_ok=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # the peer has left again
            return
        except OSError as error:
            # The process is most likely out of descriptors. The listener would stay readable and keep the loop busy.
            log.warning("shared memory: cannot accept on %s: %s", self.name, error)
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(_RETRY_ACCEPT_S, self._loop.add_reader, self._listener, self._accept)
            return
        connection.setblocking(False)
        if (reason := self._objection(connection)) is not None:
            connection.close()
            self._refused(reason)
            return
        try:
            socket.send_fds(connection, [self._greeting], [self._pool_fd])
        except OSError as error:
            log.info("shared memory: a peer left before it was served: %s", error)
            connection.close()
            return
        self._connections.add(connection)
        self._loop.add_reader(connection, self._hang_up, connection)

    def _objection(self, connection: socket.socket) -> str | None:
        uid = peer_uid(connection)
        if uid != os.geteuid():
            return f"a process of user {uid}"
        return f"one more than {MAX_CONNECTIONS} connections" if len(self._connections) >= MAX_CONNECTIONS else None

    def _refused(self, what: str) -> None:
        """Logs a refusal, at most one in `_REFUSAL_LOG_EVERY_S`: a refused peer may come again and again."""
        self._num_refused += 1
        now = self._loop.time()
        if now >= self._next_refusal_log_s:
            self._next_refusal_log_s = now + _REFUSAL_LOG_EVERY_S
            log.warning("shared memory: refused %s on %s (%d refused so far)", what, self.name, self._num_refused)

    def _hang_up(self, connection: socket.socket) -> None:
        """Closes a connection: it is readable only when the peer has closed it, or this server closes."""
        self._loop.remove_reader(connection)
        self._connections.discard(connection)
        connection.close()


def _listen(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        _remove_stale(name)
        listener.bind(socket_address(name))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(f"shared memory: cannot listen on {name}: {error}") from error
    return listener


def _remove_stale(name: str) -> None:
    """Removes a socket path that a killed process has left. A path at which a process answers is left alone."""
    if name.startswith("@") or not Path(name).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(name)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                os.unlink(name)


def peer_uid(connection: socket.socket) -> int:
    """Returns the user id of the process at the other end, which has connected or listens."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return int(_PEER_CREDENTIALS.unpack(credentials)[1])
