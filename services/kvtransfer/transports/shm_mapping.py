"""Maps other workers' pools read-only: the destination's end of the shared memory transport.

Owns: the mappings, one per source incarnation, and for each the connection whose end says that the source is gone. A
mapping is dropped when its source is gone; a copy under way may still finish, but its result is worthless. Memory that
a socket hands out is mapped only if it belongs to this user and is sealed. Never: writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import socket
from array import array
from collections.abc import Sequence
from concurrent.futures import Executor

from baton.v1 import types_pb2
from services.core.clock import Clock, MonotonicClock, timeout_after
from services.core.errors import LayoutMismatch, ProtocolViolation, StaleIncarnation
from services.core.sealed_memory import what_is_wrong
from services.kv.regions import BlockMemory
from services.kvtransfer.transports import PROBE_BYTES, FetchName, TransportUnavailable, fastest_s
from services.kvtransfer.transports.shm import GREETING, MAGIC, peer_uid, socket_address
from services.kvtransfer.wire import Announced

log = logging.getLogger(__name__)


class ShmUnavailable(TransportUnavailable):
    """Says that the source's pool cannot be mapped from here."""


class Mapping:
    """Maps one source's pool with PROT_READ. It is unmapped once it was dropped and has no pin."""

    def __init__(self, connection: socket.socket, fd: int, block_bytes: int, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.connection = connection
        self._block_bytes = block_bytes
        self._map = mmap.mmap(fd, block_bytes * num_blocks, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._view = memoryview(self._map)
        self._num_pins = 0
        self._dropped = False

    @property
    def closed(self) -> bool:
        return self._map.closed

    def block(self, block_id: int) -> memoryview:
        start = block_id * self._block_bytes
        return self._view[start : start + self._block_bytes]

    def probe(self) -> float:
        """Returns the rate, in bytes per second, at which some of the memory is copied; it is looked at by nobody."""
        num_bytes = min(PROBE_BYTES, self._view.nbytes)
        scratch = bytearray(num_bytes)

        def bring() -> None:
            scratch[:] = self._view[:num_bytes]

        return num_bytes / max(1e-9, fastest_s(bring))

    def pin(self) -> None:
        assert not self.closed, "the mapping is gone"
        self._num_pins += 1

    def unpin(self) -> None:
        self._num_pins -= 1
        self._close_if_unused()

    def drop(self) -> None:
        self._dropped = True
        self.connection.close()
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._dropped and self._num_pins == 0 and not self.closed:
            self._view.release()
            self._map.close()


class MappingCache:
    """Implements `DestinationEnd`: keeps the mappings by source incarnation. Event loop only."""

    transport = types_pb2.TRANSPORT_SHM

    def __init__(self, block_bytes: int, *, clock: Clock | None = None, timeout_s: float = 2.0) -> None:
        """`clock` keeps awake time, by which sources are judged. `timeout_s` bounds the wait for a greeting."""
        self._block_bytes = block_bytes
        self._clock = clock or MonotonicClock()
        self._timeout_s = timeout_s
        self._mappings: dict[int, Mapping] = {}

    def __len__(self) -> int:
        return len(self._mappings)

    async def connect(self, source: types_pb2.KVSource, offer: types_pb2.KVOffer, fetch: FetchName) -> ShmCopier:
        return ShmCopier(await self.get(source, offer.shm_socket))

    async def probe(self, source: types_pb2.KVSource, offer: types_pb2.KVOffer) -> float:
        mapping = await self.get(source, offer.shm_socket)
        mapping.pin()
        copying = asyncio.get_running_loop().run_in_executor(None, mapping.probe)
        copying.add_done_callback(lambda _: mapping.unpin())
        return await asyncio.shield(copying)  # the thread goes on if this task is cancelled

    async def get(self, source: types_pb2.KVSource, name: str) -> Mapping:
        """Returns the source's mapping, made on first use from its socket `name`. Pin it before the next await.

        Raises ShmUnavailable, StaleIncarnation (another process answers there), LayoutMismatch and ProtocolViolation.
        """
        mapping = self._mappings.get(source.incarnation)
        if mapping is not None:
            return mapping
        mapping = await self._map(source, name)
        existing = self._mappings.get(source.incarnation)
        if existing is not None:  # two fetches came at the same time
            mapping.drop()
            return existing
        self._mappings[source.incarnation] = mapping
        asyncio.get_running_loop().add_reader(mapping.connection, self._drop, source.incarnation)
        log.info(
            "kv transfer from %s goes by shared memory: %d blocks at %s",
            source.address,
            mapping.num_blocks,
            name,
        )
        return mapping

    def close(self) -> None:
        for incarnation in list(self._mappings):
            self._drop(incarnation)

    def _drop(self, incarnation: int) -> None:
        """Drops a mapping: its connection is readable only when the source is gone, or this worker closes."""
        mapping = self._mappings.pop(incarnation)
        asyncio.get_running_loop().remove_reader(mapping.connection)
        mapping.drop()

    async def _map(self, source: types_pb2.KVSource, name: str) -> Mapping:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            connection.connect(socket_address(name))
            if (uid := peer_uid(connection)) != os.geteuid():
                raise ShmUnavailable(f"shared memory at {name}: it is of user {uid}")
            async with timeout_after(self._timeout_s, self._clock):
                await _readable(connection)
            greeting, fds, truncated = receive_greeting(connection)
            try:
                if truncated:
                    raise ProtocolViolation(f"{name} hands out more than one descriptor")
                return self._accept(source, name, connection, greeting, fds)
            finally:
                for fd in fds:
                    os.close(fd)
        except (OSError, TimeoutError, ValueError) as error:  # ValueError: a name that no socket can have
            connection.close()
            raise ShmUnavailable(f"shared memory at {name}: {error or 'no answer'}") from error
        except BaseException:
            connection.close()
            raise

    def _accept(
        self, source: types_pb2.KVSource, name: str, connection: socket.socket, greeting: bytes, fds: Sequence[int]
    ) -> Mapping:
        if len(greeting) != GREETING.size or len(fds) != 1:
            raise ShmUnavailable(f"shared memory at {name}: refused")
        magic, incarnation, block_bytes, num_blocks = GREETING.unpack(greeting)
        if magic != MAGIC:
            raise ProtocolViolation(f"{name} is not a baton socket")
        if incarnation != source.incarnation:
            raise StaleIncarnation("the source has restarted: another process hands out memory at its socket")
        if block_bytes != self._block_bytes:
            raise LayoutMismatch(f"block_bytes: {self._block_bytes} != {block_bytes}")
        if not num_blocks:
            raise ProtocolViolation("the source's memory has no blocks")
        if (wrong := what_is_wrong(fds[0], block_bytes * num_blocks)) is not None:
            raise ShmUnavailable(f"shared memory at {name}: {wrong}")
        return Mapping(connection, fds[0], block_bytes, num_blocks)


class ShmCopier:
    transport = types_pb2.TRANSPORT_SHM
    carried = False
    num_copies = 1
    threads: Executor | None = None

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping

    def count(self, message: Announced) -> int:
        if not all(0 <= block_id < self._mapping.num_blocks for block_id in message.pool_blocks):
            raise ProtocolViolation("a block lies outside the source's pool")
        return len(message.pool_blocks)

    def copy(self, message: Announced, memory: BlockMemory, targets: Sequence[int]) -> None:
        with contextlib.ExitStack() as views:
            blocks = [views.enter_context(self._mapping.block(pool_block)) for pool_block in message.pool_blocks]
            memory.write_blocks(targets, blocks)

    def stop(self) -> None:
        """Does nothing: a copy in memory is soon over."""

    def pin(self) -> None:
        self._mapping.pin()

    def unpin(self) -> None:
        self._mapping.unpin()


def receive_greeting(connection: socket.socket) -> tuple[bytes, list[int], bool]:
    """Returns the greeting's bytes, the descriptor that came with it, and whether there were more.

    There is room for one descriptor, and the kernel closes the others. (Python's `recv_fds` ignores the flags it takes,
    so that a child process would inherit the descriptor.)
    """
    fds = array("i")
    greeting, ancillary, flags, _ = connection.recvmsg(
        GREETING.size, socket.CMSG_LEN(fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return greeting, list(fds), bool(flags & socket.MSG_CTRUNC)


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(connection, wake)
    try:
        await ready
    finally:
        loop.remove_reader(connection)
