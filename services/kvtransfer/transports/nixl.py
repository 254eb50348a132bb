"""Has destinations read blocks straight from the pool of their source, by one-sided reads of NIXL's.

The source registers its pool and tells in its offer how to reach it; the Fetch stream says which of its blocks are
final, and the destination reads them into its own pool, without the source's doing. So a source cannot stop a read of
blocks whose lease has just ended. That is harmless: what such a read has brought is refused the Release, and is never
used.

UCX finds the way: RDMA or NVLink where there is, else memory of the same host, else TCP. It asks nobody who he is, so
whoever reaches its TCP port can read and write the memory of the process (docs/security.md).

Owns: the two ends, and what an offer says. Never: NIXL itself (`nixl_agent`), which blocks are final.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from baton.v1 import types_pb2
from services.core.clock import Clock, MonotonicClock, timeout_after
from services.core.daemon_threads import DaemonThreads
from services.core.errors import LayoutMismatch, ProtocolViolation, StaleIncarnation, TransferFailed
from services.kv.lease import FetchTicket
from services.kv.regions import BlockMemory, Region
from services.kvtransfer.transports import PROBE_BYTES, FetchName, fastest_s, on_thread
from services.kvtransfer.transports.nixl_agent import NixlAgent, NixlUnavailable
from services.kvtransfer.transports.shm import PoolAnnouncer
from services.kvtransfer.wire import Announced

log = logging.getLogger(__name__)

_CARD = struct.Struct("<8sQQQQQ16s")
"""What comes before NIXL's own metadata in an offer: magic, incarnation, address of the hello, address of the pool,
bytes of a block, number of blocks, device."""
_MAGIC = b"bat-nixl"
_HELLO = struct.Struct("<8sQ")
"""What is read of a source at first, from memory registered for it: magic, incarnation."""
_MEET_S = 10.0
"""How long it may take to set up an agent for a source, to register this pool with it and to read the hello."""
_HELLO_S = 3.0
_STOPPED_S = 1.0
"""How long a read whose fetch was given up may go on before its agent is ended for it, if nobody else needs that."""
_IDLE_S = 300.0


def whole(memory: BlockMemory) -> Region:
    """Returns the region of all blocks. Raises NixlUnavailable if they do not lie one after another."""
    first, last = memory.region(0), memory.region(memory.num_blocks - 1)
    if last.address != first.address + (memory.num_blocks - 1) * memory.block_bytes:
        raise NixlUnavailable("needs a pool that lies in one piece")
    return Region(first.address, memory.num_blocks * memory.block_bytes, first.device)


class Page:
    """Has host memory that an agent can register: for a hello, and for probes."""

    def __init__(self) -> None:
        self.bytes = mmap.mmap(-1, PROBE_BYTES)
        self.region = Region(ctypes.addressof(ctypes.c_char.from_buffer(self.bytes)), PROBE_BYTES, "cpu")


@dataclass(frozen=True, slots=True)
class Card:
    """Is what a source tells of itself in its offer."""

    incarnation: int
    hello: Region
    pool: Region
    block_bytes: int
    metadata: bytes
    """What NIXL must know of its agent."""

    def to_offer(self) -> bytes:
        card = _CARD.pack(
            _MAGIC,
            self.incarnation,
            self.hello.address,
            self.pool.address,
            self.block_bytes,
            self.num_blocks,
            self.pool.device.encode(),
        )
        return card + self.metadata

    @classmethod
    def of_offer(cls, offered: bytes) -> Card:
        """Returns the card. Raises ProtocolViolation if the bytes are none, as of another version."""
        if len(offered) < _CARD.size or not offered.startswith(_MAGIC):
            raise ProtocolViolation("the source's NIXL offer makes no sense")
        _, incarnation, hello, pool, block_bytes, num_blocks, device = _CARD.unpack_from(offered)
        return cls(
            incarnation,
            Region(hello, PROBE_BYTES, "cpu"),
            Region(pool, block_bytes * num_blocks, device.rstrip(b"\0").decode("ascii", "replace")),
            block_bytes,
            offered[_CARD.size :],
        )

    @property
    def num_blocks(self) -> int:
        return self.pool.length // self.block_bytes

    def block(self, block_id: int) -> Region:
        return self.pool.part(block_id * self.block_bytes, self.block_bytes)


class NixlSource:
    """Implements `SourceEnd`: registers the pool for as long as it is open. Raises NixlUnavailable."""

    transport = types_pb2.TRANSPORT_NIXL
    description = "nixl"

    def __init__(self, memory: BlockMemory, reader: Executor, incarnation: int, *, ucx: Mapping[str, str]) -> None:
        self._memory = memory
        self._reader = reader
        pool = whole(memory)
        self._hello = Page()
        self._hello.bytes[: _HELLO.size] = _HELLO.pack(_MAGIC, incarnation)
        self._agent = NixlAgent(f"baton-{incarnation:016x}", serves=True, ucx=ucx)
        self._agent.register(pool)
        self._agent.register(self._hello.region)
        card = Card(incarnation, self._hello.region, pool, memory.block_bytes, self._agent.metadata)
        self._offer = types_pb2.KVOffer(transport=self.transport, nixl_metadata=card.to_offer())

    def offer(self) -> types_pb2.KVOffer:
        return self._offer

    def announcer(self, ticket: FetchTicket, *, checksums: bool) -> PoolAnnouncer:
        return PoolAnnouncer(self._memory, self._reader, checksums=checksums)

    def close(self) -> None:
        """Ends the agent, and reads under way with it. Then the pool's memory may go."""
        self._agent.close()


class Peer:
    """Is a source as this worker reads it: by an agent of its own, whose end leaves those of other sources alone."""

    def __init__(self, card: Card, agent: NixlAgent, name: str, page: Page) -> None:
        self.card = card
        self.agent = agent
        self.name = name
        self.page = page
        """Where the hello and probes are read to; it is registered with the agent."""
        self.num_pins = 0
        self.num_given_up = 0
        """Pins of copiers that were stopped."""
        self.expiry: asyncio.TimerHandle | None = None

    def pin(self) -> None:
        self.num_pins += 1
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None

    def probe(self) -> float:
        """Returns how many seconds `PROBE_BYTES` take. For a thread."""
        return fastest_s(lambda: self.agent.read(self.name, [self.page.region], [self.card.hello], lambda: _HELLO_S))


class NixlDestination:
    """Implements `DestinationEnd`: keeps an agent for each source, by incarnation. Event loop only."""

    transport = types_pb2.TRANSPORT_NIXL

    def __init__(
        self,
        memory: BlockMemory,
        *,
        ucx: Mapping[str, str],
        clock: Clock | None = None,
        silence_s: float = 5.0,
    ) -> None:
        """`memory` is the pool that blocks are read into. `clock` keeps awake time. `silence_s` is for each read."""
        self.silence_s = silence_s
        self.threads: Executor = DaemonThreads(None, "kv-nixl")
        self._memory = memory
        self._ucx = ucx
        self._clock = clock or MonotonicClock()
        self._peers: dict[int, Peer] = {}
        self._meetings: dict[int, asyncio.Task[Peer]] = {}
        self.agents: set[NixlAgent] = set()
        self._closed = False

    def __len__(self) -> int:
        """Returns how many sources this worker has an agent for."""
        return len(self.agents)

    async def connect(self, source: types_pb2.KVSource, offer: types_pb2.KVOffer, fetch: FetchName) -> NixlCopier:
        return NixlCopier(self, await self._peer(source, offer))

    async def probe(self, source: types_pb2.KVSource, offer: types_pb2.KVOffer) -> float:
        peer = await self._peer(source, offer)
        peer.pin()
        try:
            return PROBE_BYTES / await on_thread(self.threads, peer.probe)
        finally:
            self.unpin(peer)

    def close(self) -> None:
        """Ends all agents. Then nothing reads into the pool any more, and its memory may go."""
        self._closed = True
        for meeting in list(self._meetings.values()):
            meeting.cancel()
        for peer in list(self._peers.values()):
            self._forget(peer)
        self.threads.shutdown()
        for agent in self.agents:
            agent.close()
        self.agents.clear()

    async def _peer(self, source: types_pb2.KVSource, offer: types_pb2.KVOffer) -> Peer:
        peer = self._peers.get(source.incarnation)
        if peer is not None and not peer.agent.closed:
            return peer
        meeting = self._meetings.get(source.incarnation)
        if meeting is None:
            card = self._check(source, Card.of_offer(offer.nixl_metadata))
            meeting = asyncio.create_task(self._meet(source, card), name="kv-nixl-meet")
            self._meetings[source.incarnation] = meeting
            meeting.add_done_callback(partial(self._met, source.incarnation))
        try:
            async with timeout_after(_MEET_S, self._clock):
                return await asyncio.shield(meeting)
        except TimeoutError:
            raise NixlUnavailable("NIXL takes too long to reach the source") from None

    def _check(self, source: types_pb2.KVSource, card: Card) -> Card:
        if card.incarnation != source.incarnation:
            raise StaleIncarnation("the source has restarted: the offer is of another process")
        if card.block_bytes != self._memory.block_bytes:
            raise LayoutMismatch(f"block_bytes: {self._memory.block_bytes} != {card.block_bytes}")
        return card

    async def _meet(self, source: types_pb2.KVSource, card: Card) -> Peer:
        peer = await on_thread(self.threads, partial(self._greet, card))
        self._peers[source.incarnation] = peer
        self.rest(peer)
        log.info("kv transfer from %s goes by NIXL: %d blocks", source.address, card.num_blocks)
        return peer

    def _met(self, incarnation: int, meeting: asyncio.Task[Peer]) -> None:
        del self._meetings[incarnation]
        if not meeting.cancelled():
            meeting.exception()  # marks it as retrieved: whoever waited may have left

    def _greet(self, card: Card) -> Peer:
        """Makes the agent for a source, and reads its hello, on a thread: the way to it works, and it is the one."""
        agent, page = NixlAgent(f"reads-{card.incarnation:016x}", serves=False, ucx=self._ucx), Page()
        self.agents.add(agent)
        try:
            agent.register(whole(self._memory))
            agent.register(page.region)
            peer = Peer(card, agent, agent.meet(card.metadata), page)
            to, said = page.region.part(0, _HELLO.size), card.hello.part(0, _HELLO.size)
            agent.read(peer.name, [to], [said], lambda: _HELLO_S)
            if page.bytes[: _HELLO.size] != _HELLO.pack(_MAGIC, card.incarnation):
                raise StaleIncarnation("the source has restarted: another process has memory where its pool was")
            return peer
        except BaseException as error:
            self._end(agent)
            if isinstance(error, TransferFailed):
                raise NixlUnavailable(f"NIXL does not reach the source: {error}") from error
            raise

    def unpin(self, peer: Peer) -> None:
        peer.num_pins -= 1
        self.rest(peer)

    def rest(self, peer: Peer) -> None:
        """Sets the time at which an agent that nobody uses is ended."""
        if peer.num_pins == 0 and not self._closed:
            loop = asyncio.get_running_loop()
            peer.expiry = loop.call_later(0.0 if peer.agent.closed else _IDLE_S, self._forget, peer)

    def _forget(self, peer: Peer) -> None:
        if peer.expiry is not None:
            peer.expiry.cancel()
        if self._peers.get(peer.card.incarnation) is peer:  # and no newer one, in place of one that had failed
            del self._peers[peer.card.incarnation]
        self.threads.submit(self._end, peer.agent)

    def _end(self, agent: NixlAgent) -> None:
        agent.close()
        self.agents.discard(agent)


class NixlCopier:
    """Implements `Copier`."""

    transport = types_pb2.TRANSPORT_NIXL
    carried = False
    num_copies = 2
    """While one is read, the next is announced: else each would wait for the acknowledgement of the one before."""

    def __init__(self, end: NixlDestination, peer: Peer) -> None:
        self.threads: Executor = end.threads
        self._end = end
        self._peer = peer
        self._stopped = False
        self._num_pins = 0

    def count(self, message: Announced) -> int:
        if not all(0 <= block_id < self._peer.card.num_blocks for block_id in message.pool_blocks):
            raise ProtocolViolation("a block lies outside the source's pool")
        return len(message.pool_blocks)

    def copy(self, message: Announced, memory: BlockMemory, targets: Sequence[int]) -> None:
        sources = [self._peer.card.block(block_id) for block_id in message.pool_blocks]
        regions = [memory.region(target) for target in targets]
        read = partial(self._peer.agent.read, self._peer.name, regions, sources, self._patience_s)
        if regions[0].device == "cpu":
            memory.fill_blocks(targets, lambda _: read())  # the views are of these regions
        else:
            read()

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._peer.num_given_up += self._num_pins

    def pin(self) -> None:
        self._num_pins += 1
        self._peer.pin()

    def unpin(self) -> None:
        self._num_pins -= 1
        self._peer.num_given_up -= self._stopped
        self._end.unpin(self._peer)

    def _patience_s(self) -> float:
        """Returns how long the read may take: it shares the way to the source with the others.

        One that was given up may take as long where other fetches use the agent, since they end with it. A source that
        is silent ends theirs too.
        """
        if self._stopped and self._peer.num_pins == self._peer.num_given_up:
            return _STOPPED_S
        return self._end.silence_s
