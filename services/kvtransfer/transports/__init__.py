"""How blocks travel. A transport has two ends, each an object: the source's makes `FetchBlocks` messages, the
destination's turns each into bytes of its own pool. Memory is read and written on copy threads.

Which of them a worker has is said in one place, `services.worker.transfer.TRANSPORTS`; nothing else knows one from
another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Protocol, TypeVar

from baton.v1 import kvtransfer_pb2, types_pb2
from services.core.errors import TransferFailed
from services.kv.lease import FetchTicket
from services.kv.regions import BlockMemory

T = TypeVar("T")


class TransportUnavailable(TransferFailed):
    """Blocks cannot be had this way, here or from here; another transport may work."""


class SourceEnd(Protocol):
    """One way out of this worker's pool. Made on the event loop; `close` when its server has stopped."""

    transport: types_pb2.Transport

    @property
    def description(self) -> str:
        """For people."""
        ...

    def offer(self) -> types_pb2.KVOffer:
        """What destinations are told of it."""
        ...

    def announcer(self, ticket: FetchTicket, *, checksums: bool) -> Announcer:
        """For one fetch by this transport."""
        ...

    def close(self) -> None: ...


class DestinationEnd(Protocol):
    """One way into this worker's pool. `close` when no copy is under way any more."""

    transport: types_pb2.Transport

    async def connect(self, source: types_pb2.KVSource, offer: types_pb2.KVOffer) -> Copier:
        """For one fetch from a source that offers this transport; to be pinned before the next await.

        TransportUnavailable if it does not work from here, so that another is tried. Whatever else it raises speaks
        against the source.
        """
        ...

    def close(self) -> None: ...


class Announcer(Protocol):
    """Source end, of one fetch. Called on the event loop; what reads memory is done on the thread it was given."""

    def room(self, first_block: int, num_blocks: int) -> int:
        """How many of the next blocks can be announced now, in one message; they are `announce`d before the next await.
        0: none, and the fetch's stream is woken when that may have changed. `first_block`: index in the sequence."""
        ...

    async def announce(self, first_block: int, pool_blocks: Sequence[int]) -> kvtransfer_pb2.FetchBlocks:
        """The message for as many blocks as there was room for."""
        ...


async def on_thread(reader: Executor, read: Callable[[], T]) -> T:
    """What a read of memory gives. Cancelled, it goes on to its end on the thread if it has begun."""
    return await asyncio.wrap_future(reader.submit(read))


class Copier(Protocol):
    """Destination end, of one fetch."""

    transport: types_pb2.Transport
    carried: bool
    """The messages bring the blocks' bytes."""

    def count(self, message: kvtransfer_pb2.FetchBlocks) -> int:
        """How many blocks it brings. ProtocolViolation unless they can be copied."""
        ...

    def copy(self, message: kvtransfer_pb2.FetchBlocks, memory: BlockMemory, targets: Sequence[int]) -> None:
        """Writes the message's blocks to `targets`, one each. Reads and writes nothing after it has returned."""
        ...

    def pin(self) -> None:
        """Keeps what the copies read from in place, until as many `unpin`. Event loop only."""
        ...

    def unpin(self) -> None: ...
