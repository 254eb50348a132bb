"""Carries blocks inside the messages of the Fetch stream. This transport needs nothing but the connection."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

from baton.v1 import kvtransfer_pb2, types_pb2
from services.core.errors import ProtocolViolation
from services.kv.lease import FetchTicket
from services.kv.regions import BlockMemory
from services.kvtransfer.checksums import checksum
from services.kvtransfer.transports import FetchName, on_thread
from services.kvtransfer.wire import Announced, carrying

# Python's gRPC streams fastest with messages of about this size (measured). A larger block travels alone.
_MESSAGE_BYTES = 1 << 20


class GrpcSource:
    """Implements `SourceEnd`: every client that can open a fetch gets the blocks in its messages."""

    transport = types_pb2.TRANSPORT_GRPC
    description = "grpc"

    def __init__(self, memory: BlockMemory, reader: Executor) -> None:
        self._memory = memory
        self._reader = reader

    def offer(self) -> types_pb2.KVOffer:
        return types_pb2.KVOffer(transport=self.transport)

    def announcer(self, ticket: FetchTicket, *, checksums: bool) -> GrpcAnnouncer:
        return GrpcAnnouncer(self._memory, self._reader, checksums=checksums)

    def close(self) -> None:
        """Does nothing: the gRPC server belongs to the worker's host."""


class GrpcDestination:
    """Implements `DestinationEnd`. It works with any source whose address can be dialled.

    It is not probed: a socket carries the same bytes over the same network with less work, so that where both work a
    probe would find out nothing. How fast messages are, fetches by them show (`FetchStream.carrying_s`).
    """

    transport = types_pb2.TRANSPORT_GRPC

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes

    async def connect(self, source: types_pb2.KVSource, offer: types_pb2.KVOffer, fetch: FetchName) -> GrpcCopier:
        return GrpcCopier(self._block_bytes)

    def close(self) -> None:
        """Does nothing: the channels belong to the fetcher."""


class GrpcAnnouncer:
    def __init__(self, memory: BlockMemory, reader: Executor, *, checksums: bool) -> None:
        self._memory = memory
        self._reader = reader
        self._checksums = checksums
        self._blocks_per_message = max(1, _MESSAGE_BYTES // memory.block_bytes)
        self._more_follow = False
        """Whether there are blocks to announce behind those of the next message."""

    def room(self, first_block: int, num_blocks: int) -> int:
        self._more_follow = num_blocks > self._blocks_per_message
        return min(num_blocks, self._blocks_per_message)

    async def announce(self, first_block: int, pool_blocks: Sequence[int]) -> bytes:
        announced = kvtransfer_pb2.FetchBlocks(first_block=first_block, more_follow=self._more_follow)
        return await on_thread(self._reader, lambda: self._read(announced, pool_blocks))

    def _read(self, announced: kvtransfer_pb2.FetchBlocks, pool_blocks: Sequence[int]) -> bytes:
        blocks = self._memory.read_blocks(pool_blocks)
        if self._checksums:
            announced.checksums.extend(map(checksum, blocks))
        return carrying(announced, blocks)


class GrpcCopier:
    transport = types_pb2.TRANSPORT_GRPC
    carried = True
    num_copies = 1
    threads: Executor | None = None

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes

    def count(self, message: Announced) -> int:
        return len(message.data)

    def copy(self, message: Announced, memory: BlockMemory, targets: Sequence[int]) -> None:
        if any(len(block) != self._block_bytes for block in message.data):
            raise ProtocolViolation(f"a block is not {self._block_bytes} bytes")
        memory.write_blocks(targets, message.data)

    def stop(self) -> None:
        """Does nothing: a copy in memory is soon over."""

    def pin(self) -> None:
        """Does nothing: the message owns its bytes."""

    def unpin(self) -> None:
        pass
