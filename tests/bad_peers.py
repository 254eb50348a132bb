"""Peers that misbehave: memory that flips bits, a source whose seal makes no sense, sockets that dawdle.

Owns: the misbehaviour. Never: what a test expects of whoever meets it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from baton.v1 import kvtransfer_pb2, kvtransfer_pb2_grpc, types_pb2
from services.rpc.serving import GrpcServer
from services.worker.host import TRANSFER_SERVICE, WorkerHost

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HTTP2_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


class FlippingMemory:
    """A worker's pool as its fetches see it: the next `num_flips` messages that are copied leave one wrong bit."""

    def __init__(self, host: WorkerHost) -> None:
        self.num_flips = 0
        self._flipped = False
        self._memory: Any = host.engine.cache
        host.fetcher._memory = self

    @property
    def block_bytes(self) -> int:
        return int(self._memory.block_bytes)

    def read_block(self, block_id: int) -> Any:
        self._flipped = False  # the message is complete: it is verified
        return self._memory.read_block(block_id)

    def write_block(self, block_id: int, data: Any) -> None:
        if self.num_flips and not self._flipped:
            self.num_flips -= 1
            self._flipped = True
            data = bytearray(data)
            data[len(data) // 2] ^= 1
        self._memory.write_block(block_id, data)


class BadSource(kvtransfer_pb2_grpc.KVTransferServiceServicer):
    """Serves any lease: blocks of zeros, then `seal`, or the end of the stream if there is none. Releases are valid."""

    def __init__(self, host: WorkerHost) -> None:
        """Takes the next handoff of `host` upon itself, by standing as its source."""
        self.seal: kvtransfer_pb2.FetchSealed | None = None
        self.num_blocks = 0
        """Sent before the seal."""
        self.num_fetches = 0
        self._block = bytes(host.engine.cache.block_bytes)
        self._server = GrpcServer()
        self._host = host
        self._source = host.source

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._server.add(TRANSFER_SERVICE, kvtransfer_pb2_grpc.add_KVTransferServiceServicer_to_server, self)
        await self._server.start()
        self._host.source = self._stand_in  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._host.source = self._source  # type: ignore[method-assign]
            await self._server.stop()

    def _stand_in(self) -> types_pb2.KVSource:
        self._host.source = self._source  # type: ignore[method-assign]
        source = self._source()
        source.address, source.shm_socket = self._server.address, ""
        return source

    async def Fetch(self, request_iterator: Any, context: Any) -> AsyncIterator[kvtransfer_pb2.FetchResponse]:
        self.num_fetches += 1
        await anext(aiter(request_iterator))
        blocks = kvtransfer_pb2.FetchBlocks(data=[self._block] * self.num_blocks)
        yield kvtransfer_pb2.FetchResponse(blocks=blocks)
        if self.seal is not None:
            yield kvtransfer_pb2.FetchResponse(sealed=self.seal)
            async for _ in request_iterator:  # until the destination hangs up
                pass

    async def Release(self, request: kvtransfer_pb2.ReleaseRequest, context: Any) -> kvtransfer_pb2.ReleaseResponse:
        return kvtransfer_pb2.ReleaseResponse(valid=True)


@contextlib.contextmanager
def connections(port: int, count: int, greeting: Callable[[int], bytes]) -> Iterator[list[socket.socket]]:
    """TCP connections to a server here, each of which has sent its greeting (by its number)."""
    with contextlib.ExitStack() as stack:
        opened = []
        for number in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(greeting(number))
            opened.append(connection)
        yield opened
