"""Defines what a transport is. It has two ends, each an object.

The source's end makes `FetchBlocks` messages, and the destination's end turns each into bytes of its own pool. Memory
is read and written on copy threads. `services.worker.transfer.TRANSPORTS` says which transports a worker has, and how
their ends are made; nothing else asks which of them it has before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from baton.v1 import kvtransfer_pb2, types_pb2
from services.core.errors import TransferFailed
from services.kv.layout import Layout
from services.kv.lease import FetchTicket
from services.kv.regions import BlockMemory
from services.kvtransfer.wire import Announced, whole_shard

T = TypeVar("T")


class TransportUnavailable(TransferFailed):
    """Says that this transport does not work between the two workers; another may."""


@dataclass(frozen=True, slots=True)
class FetchName:
    """Names a fetch at its source."""

    lease_id: bytes
    leg: int


class SourceEnd(Protocol):
    """Sends blocks of this worker's pool. It is made on the event loop, and closed when its server has stopped."""

    transport: types_pb2.Transport

    @property
    def description(self) -> str:
        """Returns the transport's name and details, for people."""
        ...

    def offer(self) -> types_pb2.KVOffer:
        """Returns what destinations must know to use the transport."""
        ...

    def announcer(self, ticket: FetchTicket, *, checksums: bool) -> Announcer:
        """Returns the announcer for one fetch by this transport."""
        ...

    def close(self) -> None: ...


def offers_of(ends: Iterable[SourceEnd], layout: Layout) -> list[types_pb2.KVOffer]:
    """Returns what the ends offer, with the parts of blocks that they have: whole ones of this layout."""
    offers = []
    for end in ends:
        offer = types_pb2.KVOffer(shards=[whole_shard(layout)])
        offer.MergeFrom(end.offer())  # which may be the same object again and again
        offers.append(offer)
    return offers


class DestinationEnd(Protocol):
    """Brings blocks into this worker's pool. It is closed when no copy is under way any more."""

    transport: types_pb2.Transport

    async def connect(self, source: types_pb2.KVSource, offer: types_pb2.KVOffer, fetch: FetchName) -> Copier:
        """Returns the copier for the fetch from a source that offers this transport; pin it before the next await.

        Raises TransportUnavailable if the transport does not work from here, so that another is tried. Any other error
        counts against the source.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class ProbedEnd(DestinationEnd, Protocol):
    """Is a destination's end whose speed can be told beforehand. One that cannot is taken where no other works."""

    async def probe(self, source: types_pb2.KVSource, offer: types_pb2.KVOffer) -> float:
        """Returns the rate, in bytes per second, at which some MiB come from the source that nobody uses.

        Raises TransportUnavailable or another BatonError if the transport does not work from here.
        """
        ...


PROBE_BYTES = 4 << 20
"""How much a probe brings."""
_PROBES, _PROBED_S = 5, 0.1
"""A probe brings it this many times, or twice if that takes longer."""


def fastest_s(bring: Callable[[], object], now: Callable[[], float] = time.perf_counter) -> float:
    """Returns the fewest seconds that bringing it took, of several times: the first makes what the later ones find, and
    any may be held up by what else the machine does."""
    taken: list[float] = []
    while len(taken) < 2 or (len(taken) < _PROBES and sum(taken) < _PROBED_S):
        begun_s = now()
        bring()
        taken.append(now() - begun_s)
    return min(taken)


class Announcer(Protocol):
    """Makes the messages of one fetch at its source.

    It is called on the event loop, and reads memory on the reader thread it was given.
    """

    def room(self, first_block: int, num_blocks: int) -> int:
        """Returns how many of the next `num_blocks` blocks can be announced now, in one message.

        The caller must `announce` them before the next await. If it is 0, the fetch's stream is woken when that may
        have changed. `first_block` is the index of the first of them in the sequence.
        """
        ...

    async def announce(self, first_block: int, pool_blocks: Sequence[int]) -> kvtransfer_pb2.FetchBlocks | bytes:
        """Returns the message for as many blocks as `room` returned. `pool_blocks` are their ids in this pool. Where it
        carries the blocks it is a FetchResponse's bytes."""
        ...


async def on_thread(reader: Executor, read: Callable[[], T]) -> T:
    """Returns what `read` returns on the thread. A read that has begun is not stopped by cancellation."""
    return await asyncio.wrap_future(reader.submit(read))


class Copier(Protocol):
    """Copies the blocks of one fetch at its destination."""

    transport: types_pb2.Transport
    carried: bool
    """Whether the messages bring the blocks' bytes."""

    @property
    def num_copies(self) -> int:
        """Returns how many copies may be under way at once."""
        ...

    @property
    def threads(self) -> Executor | None:
        """Returns the threads on which to copy, if a copy waits for its source; None for the fetcher's."""
        ...

    def count(self, message: Announced) -> int:
        """Returns how many blocks the message brings. Raises ProtocolViolation if they are none that can be copied."""
        ...

    def copy(self, message: Announced, memory: BlockMemory, targets: Sequence[int]) -> None:
        """Writes the message's blocks to the pool blocks `targets`, one each. Raises TransferFailed and
        ProtocolViolation.

        It reads and writes nothing after it has returned, nor after it has raised.
        """
        ...

    def stop(self) -> None:
        """Makes copies under way end soon, by an error if need be: their blocks are given up. Event loop only."""
        ...

    def pin(self) -> None:
        """Keeps the memory that copies read from in place until as many calls of `unpin`. Event loop only."""
        ...

    def unpin(self) -> None: ...
