"""Peers that misbehave: memory that flips bits, a source whose seal makes no sense, sockets that dawdle.

Owns: the misbehaviour. Never: what a test expects of whoever meets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from baton.v1 import kvtransfer_pb2, kvtransfer_pb2_grpc, types_pb2
from services.kvtransfer.checksums import checksum
from services.kvtransfer.endpoint import TRANSFER_SERVICE
from services.rpc.serving import GrpcServer
from services.worker.host import WorkerHost
from tests.support.trusted import CLUSTER_TOKEN

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HTTP2_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
NO_WINDOW = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00" + b"\x00\x04" + bytes(4)
"""Settings of a client that takes no byte of an answer."""


def grpc_request(path: str, message: bytes, headers: Mapping[str, bytes]) -> bytes:
    """A whole call as it goes over a connection: for headers that no client library would send."""
    block = b"\x83\x86" + b"".join(  # POST, http
        b"\x00" + _hpack_string(name) + _hpack_string(value)
        for name, value in {
            b":path": path.encode(),
            b":authority": b"here",
            b"content-type": b"application/grpc",
            b"te": b"trailers",
            **{name.encode(): value for name, value in headers.items()},
        }.items()
    )
    body = b"\x00" + len(message).to_bytes(4, "big") + message
    return HTTP2_PREFACE + HTTP2_SETTINGS + _frame(1, 0x4, block) + _frame(0, 0x1, body)


def _frame(kind: int, flags: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + (1).to_bytes(4, "big") + payload


def _hpack_string(text: bytes) -> bytes:
    """Encodes a string without Huffman's code."""
    if len(text) < 127:
        return bytes([len(text)]) + text
    rest, length = len(text) - 127, b"\x7f"
    while rest >= 128:
        length += bytes([rest % 128 + 128])
        rest //= 128
    return length + bytes([rest]) + text


async def grpc_frames(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[tuple[int, int, bytes]]:
    """Frames (kind, flags, payload) of the connection's one call, until the server has ended it or hung up."""
    frames = []
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
        while not frames or not (frames[-1][0] == 3 or (frames[-1][0] == 1 and frames[-1][1] & 1)):
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == 6 and not head[4] & 1:
                writer.write(head[:4] + b"\x01" + head[5:] + payload)
            elif int.from_bytes(head[5:], "big"):
                frames.append((head[3], head[4], payload))
    return frames


class FlippingMemory:
    """A worker's pool as its fetches see it: the next `num_flips` messages that are copied leave one wrong bit."""

    def __init__(self, host: WorkerHost) -> None:
        self.num_flips = 0
        self._memory: Any = host.engine.cache
        host.fetcher._memory = self

    @property
    def block_bytes(self) -> int:
        return int(self._memory.block_bytes)

    def read_blocks(self, block_ids: Any) -> Any:
        return self._memory.read_blocks(block_ids)

    def write_blocks(self, block_ids: Any, data: Any) -> None:
        if self.num_flips:
            self.num_flips -= 1
            first = bytearray(data[0])
            first[len(first) // 2] ^= 1
            data = [first, *data[1:]]
        self._memory.write_blocks(block_ids, data)

    def fill_blocks(self, block_ids: Any, fill: Any) -> None:
        arrived = [bytearray(self.block_bytes) for _ in block_ids]
        fill([memoryview(block) for block in arrived])
        self.write_blocks(block_ids, arrived)


class BadSource(kvtransfer_pb2_grpc.KVTransferServiceServicer):
    """Serves any lease: blocks of zeros, then `seal`, or the end of the stream if there is none. Releases are valid."""

    def __init__(self, host: WorkerHost) -> None:
        """Takes the next handoff of `host` upon itself, by standing as its source."""
        self.seal: kvtransfer_pb2.FetchSealed | None = None
        self.num_blocks = 0
        """Sent before the seal."""
        self.num_fetches = 0
        self.num_lent: int | None = 0
        """Blocks that it lends, whatever is asked for; None: it never answers."""
        self._block = bytes(host.engine.cache.block_bytes)
        self._server = GrpcServer(token=CLUSTER_TOKEN)
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
        return self.where()

    def where(self) -> types_pb2.KVSource:
        """Returns it as a source."""
        source = self._source()
        source.address = self._server.address
        del source.offers[:]
        source.offers.add(transport=types_pb2.TRANSPORT_GRPC)
        return source

    async def Fetch(self, request_iterator: Any, context: Any) -> AsyncIterator[kvtransfer_pb2.FetchResponse]:
        self.num_fetches += 1
        opened = (await anext(aiter(request_iterator))).open
        checksums = [checksum(self._block)] * self.num_blocks if opened.checksums else []
        blocks = kvtransfer_pb2.FetchBlocks(data=[self._block] * self.num_blocks, checksums=checksums)
        yield kvtransfer_pb2.FetchResponse(blocks=blocks)
        if self.seal is not None:
            yield kvtransfer_pb2.FetchResponse(sealed=self.seal)
            async for _ in request_iterator:  # until the destination hangs up
                pass

    async def Lend(self, request: kvtransfer_pb2.LendRequest, context: Any) -> kvtransfer_pb2.LendResponse:
        if self.num_lent is None:
            await asyncio.Event().wait()
        return kvtransfer_pb2.LendResponse(num_blocks=self.num_lent, lease_id=bytes(16))

    async def Release(self, request: kvtransfer_pb2.ReleaseRequest, context: Any) -> kvtransfer_pb2.ReleaseResponse:
        return kvtransfer_pb2.ReleaseResponse(valid=True)


@contextlib.contextmanager
def connections(port: int, count: int, greeting: Callable[[int], bytes]) -> Iterator[list[socket.socket]]:
    """Opens TCP connections to a server here, each of which has sent its greeting (by its number)."""
    with contextlib.ExitStack() as stack:
        opened = []
        for number in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(greeting(number))
            opened.append(connection)
        yield opened
