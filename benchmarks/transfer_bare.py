"""Moves a pool's bytes as simply as can be, for comparison: a socket, a gRPC stream of messages of bytes, and a read of
NIXL's."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from services.engine.model.kv_cache import KVCache
from services.kvtransfer.transports.nixl_agent import NixlUnavailable, bindings, ucx_settings
from services.kvtransfer.transports.tcp import NUM_CONNECTIONS
from services.rpc.certificates import Certificates
from services.rpc.options import channel_options, server_options

if TYPE_CHECKING:
    from benchmarks.transfer_source import RemoteSource

_MESSAGE_BYTES = 1 << 20
_ASK = struct.Struct("<II")
"""The first block, and how many."""
_MOST_BUFFERS = 1000
_METHOD = "/bench.Bare/Move"


@dataclass(frozen=True)
class BareAddresses:
    """Says where the source serves the bare ways."""

    socket_port: int
    grpc_port: int
    nixl_metadata: bytes = b""
    """Empty where NIXL is not installed."""
    pool_address: int = 0


class Bare(Protocol):
    """Moves all blocks of the source's pool into this one's, again and again."""

    async def move(self) -> None: ...

    async def close(self) -> None: ...


def copy_in_memory(source: KVCache, target: KVCache) -> None:
    """Copies all blocks of one pool to another, block by block, as a transport does."""
    blocks = range(target.num_blocks)
    target.write_blocks(blocks, source.read_blocks(blocks))


class BareSocket:
    """Reads all blocks straight into the pool, in calls of as many blocks as the kernel takes, from as many connections
    as a fetch has."""

    def __init__(self, port: int, pool: KVCache) -> None:
        num_connections = min(NUM_CONNECTIONS, pool.num_blocks)
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_connections)]
        for connection in self._sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pool = pool

    async def move(self) -> None:
        ends = [self._pool.num_blocks * at // len(self._sockets) for at in range(len(self._sockets) + 1)]
        reads = [
            asyncio.to_thread(self._pool.fill_blocks, range(first, end), partial(self._read, connection, first))
            for connection, (first, end) in zip(self._sockets, itertools.pairwise(ends), strict=True)
        ]
        await asyncio.gather(*reads)

    def _read(self, connection: socket.socket, first_block: int, views: Any) -> None:
        connection.sendall(_ASK.pack(first_block, len(views)))
        left = list(views)
        while left:
            _advance(left, connection.recvmsg_into(left[:_MOST_BUFFERS], 0, socket.MSG_WAITALL)[0])

    async def close(self) -> None:
        for connection in self._sockets:
            connection.close()


class BareGrpc:
    """Reads all blocks as messages of 1 MiB, and writes them to the pool."""

    def __init__(self, port: int, pool: KVCache) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options())
        self._move = self._channel.unary_stream(_METHOD)
        self._pool = pool

    async def move(self) -> None:
        per_message, first = _per_message(self._pool), 0
        async for data in self._move(b""):
            view = memoryview(data)
            size = self._pool.block_bytes
            blocks = range(first, min(self._pool.num_blocks, first + per_message))
            parts = [view[at * size : (at + 1) * size] for at in range(len(blocks))]
            await asyncio.to_thread(self._pool.write_blocks, blocks, parts)
            first += per_message

    async def close(self) -> None:
        await self._channel.close()


class BareNixl:
    """Reads all blocks by one request of NIXL's own bindings, and looks for its end without a pause."""

    def __init__(self, source: BareAddresses, pool: KVCache) -> None:
        self._nixl = bindings()
        self._agent = _nixl_agent("bare-reads", pool)
        self._peer = str(self._agent.loadRemoteMD(source.nixl_metadata), "utf-8")
        self._pool = pool
        self._source_address = source.pool_address

    async def move(self) -> None:
        await asyncio.to_thread(self._move)

    def _move(self) -> None:
        size, here = self._pool.block_bytes, self._pool.region(0).address
        blocks = range(self._pool.num_blocks)
        targets, sources = (
            self._nixl.nixlXferDList(self._nixl.DRAM_SEG, [(start + block * size, size, 0) for block in blocks])
            for start in (here, self._source_address)
        )
        request = self._agent.createXferReq(self._nixl.NIXL_READ, targets, sources, self._peer, "", [])
        status = self._agent.postXferReq(request, "")
        while status == self._nixl.NIXL_IN_PROG:
            time.sleep(0)
            status = self._agent.getXferStatus(request)
        assert status == self._nixl.NIXL_SUCCESS, status.name
        self._agent.releaseXferReq(request)

    async def close(self) -> None:
        self._agent = None


def _nixl_agent(name: str, pool: KVCache) -> Any:
    """Returns an agent of NIXL's with the pool registered. Raises NixlUnavailable."""
    nixl = bindings()
    config = nixl.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, 10_000
    agent = nixl.nixlAgent(name, config)
    ucx = ucx_settings(on_this_host=True, asked_for=True)
    agent.createBackend("UCX", {"engine_config": ",".join(f"{key}={value}" for key, value in ucx.items())})
    size = pool.num_blocks * pool.block_bytes
    agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(pool.region(0).address, size, 0, "")]), [])
    return agent


async def _bare_nixl(source: RemoteSource, pool: KVCache) -> Bare | None:
    return BareNixl(source.bare, pool) if source.bare.nixl_metadata else None


class BareTlsSocket(BareSocket):
    """Reads all blocks in TLS, straight into the pool, a block at a time, from as many connections as a fetch has."""

    def __init__(self, port: int, pool: KVCache, context: ssl.SSLContext) -> None:
        super().__init__(port, pool)
        self._sockets = [context.wrap_socket(connection) for connection in self._sockets]

    def _read(self, connection: socket.socket, first_block: int, views: Any) -> None:
        connection.sendall(_ASK.pack(first_block, len(views)))
        for view in views:
            left = view
            while left:
                left = left[connection.recv_into(left) :]


async def _bare_socket(source: RemoteSource, pool: KVCache) -> Bare | None:
    return BareSocket(source.bare.socket_port, pool)


async def _bare_grpc(source: RemoteSource, pool: KVCache) -> Bare | None:
    return BareGrpc(source.bare.grpc_port, pool)


BARE: dict[str, Callable[[RemoteSource, KVCache], Awaitable[Bare | None]]] = {
    "a bare socket": _bare_socket,
    "bare gRPC": _bare_grpc,
    "bare NIXL": _bare_nixl,
}
"""The makers of bare ways, by their names; one that does not work here returns None."""


@contextlib.asynccontextmanager
async def serve_bare(pool: KVCache, certificates: Certificates | None) -> AsyncIterator[BareAddresses]:
    """Serves the bare ways out of the pool; with certificates, a socket in TLS alone."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve_socket, args=(listener, pool, certificates), daemon=True).start()
    if certificates is not None:
        yield BareAddresses(listener.getsockname()[1], 0)
        listener.close()
        return
    server = grpc.aio.server(options=server_options(1 << 20))

    async def move(request: bytes, context: Any) -> AsyncIterator[bytes]:
        per_message = _per_message(pool)
        for first in range(0, pool.num_blocks, per_message):
            blocks = range(first, min(pool.num_blocks, first + per_message))
            yield b"".join(pool.read_blocks(blocks))

    handler = grpc.method_handlers_generic_handler("bench.Bare", {"Move": grpc.unary_stream_rpc_method_handler(move)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        try:
            agent = _nixl_agent("bare-source", pool)
            nixl_metadata = bytes(agent.getLocalMD())
        except NixlUnavailable:
            agent, nixl_metadata = None, b""
        yield BareAddresses(listener.getsockname()[1], port, nixl_metadata, pool.region(0).address)
        del agent  # before the pool goes
    finally:
        listener.close()
        await server.stop(None)


def _serve_socket(listener: socket.socket, pool: KVCache, certificates: Certificates | None) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve_connection, args=(connection, pool, certificates), daemon=True).start()


def _serve_connection(connection: socket.socket, pool: KVCache, certificates: Certificates | None) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if certificates is not None:
            with certificates.server_context().wrap_socket(connection, server_side=True) as tls:
                while asked := tls.recv(_ASK.size):
                    for block in pool.read_blocks(_asked(asked)):
                        tls.sendall(block)
            return
        while asked := connection.recv(_ASK.size, socket.MSG_WAITALL):
            left: list[Any] = [*pool.read_blocks(_asked(asked))]
            while left:
                _advance(left, connection.sendmsg(left[:_MOST_BUFFERS]))


def _asked(asked: bytes) -> range:
    first, count = _ASK.unpack(asked)
    return range(first, first + count)


def _advance(left: list[Any], num_bytes: int) -> None:
    whole = 0
    while whole < len(left) and num_bytes >= left[whole].nbytes:
        num_bytes -= left[whole].nbytes
        whole += 1
    del left[:whole]
    if num_bytes:
        left[0] = left[0][num_bytes:]


def _per_message(pool: KVCache) -> int:
    return max(1, _MESSAGE_BYTES // pool.block_bytes)
