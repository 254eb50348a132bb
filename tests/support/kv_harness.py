"""A source and a destination as a worker would put them together: real servers on port 0, real memfds, no engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import takewhile
from typing import Any

import grpc
import pytest

from baton.v1 import kvtransfer_pb2, kvtransfer_pb2_grpc, types_pb2
from services.core.clock import ManualClock
from services.core.hashing import BlockHash, block_hashes
from services.core.ids import new_incarnation, new_lease_id
from services.kv.imports import Import, ImportTable
from services.kv.layout import Layout
from services.kv.lease import FetchTicket, Lease
from services.kv.lease_table import LeaseTable
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.borrowing import Borrower
from services.kvtransfer.client import BlockFetcher, FetchOrder, FetchOutcome
from services.kvtransfer.lending import Lender
from services.kvtransfer.peers import Peers
from services.kvtransfer.servicer import KVTransferServicer
from services.kvtransfer.transports import SourceEnd
from services.kvtransfer.transports.grpc import GrpcDestination, GrpcSource
from services.kvtransfer.transports.nixl import NixlDestination, NixlSource
from services.kvtransfer.transports.nixl_agent import is_installed
from services.kvtransfer.transports.shm import PoolAnnouncer, ShmServer
from services.kvtransfer.transports.shm_mapping import MappingCache
from services.kvtransfer.transports.shm_source import ShmSource
from services.kvtransfer.transports.staging import Staging, StagingArea
from services.kvtransfer.transports.tcp_destination import TcpDestination
from services.kvtransfer.transports.tcp_source import TcpSource
from services.kvtransfer.wire import layout_to_proto
from services.rpc.certificates import Certificates
from services.rpc.serving import GrpcServer
from services.rpc.status import from_call
from tests.support.kv_memory import DeviceMemory, MemfdMemory, content
from tests.support.patience import HANG_S
from tests.support.trusted import CLUSTER_TOKEN, dial

LAYOUT = Layout("tiny", "weights", "config", "float32", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16)
TOKEN = types_pb2.SequenceTokens(leg=1, position=0, token_ids=[42])
NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not is_installed(), reason="NIXL is not installed"))
UCX = {"NET_DEVICES": "lo"}
TLS: Certificates | None = None
"""What sources and destinations wrap their sockets in; a test may set it."""


async def until(predicate: Callable[[], bool]) -> None:
    """Returns when the predicate holds."""
    async with asyncio.timeout(HANG_S):
        while not predicate():  # noqa: ASYNC110  (of all that runs here; there is no single event)
            await asyncio.sleep(0.001)


class LateNixl:
    """Is a source's end of NIXL, which is made when the first offer is asked for: it takes its time."""

    transport = types_pb2.TRANSPORT_NIXL
    description = "nixl"

    def __init__(self, memory: MemfdMemory, reader: ThreadPoolExecutor, incarnation: int) -> None:
        self._make = lambda: NixlSource(memory, reader, incarnation, ucx=UCX)
        self.end: NixlSource | None = None

    def offer(self) -> types_pb2.KVOffer:
        self.end = self.end or self._make()
        return self.end.offer()

    def announcer(self, ticket: FetchTicket, *, checksums: bool) -> PoolAnnouncer:
        assert self.end is not None, "nobody was offered NIXL"
        return self.end.announcer(ticket, checksums=checksums)

    def close(self) -> None:
        if self.end is not None:
            self.end.close()


class Source:
    """Is a worker that leases its blocks. Lease `n` of a test has the content seeds 100 n, 100 n + 1, …

    With `num_slots` its pool cannot be mapped, and hands over through so many slots."""

    def __init__(
        self,
        layout: Layout = LAYOUT,
        *,
        shared: bool = True,
        num_slots: int = 0,
        servicer: type[KVTransferServicer] = KVTransferServicer,
        silence_s: float = HANG_S,
    ) -> None:
        self.clock = ManualClock()
        self.layout = layout
        self.incarnation = new_incarnation()
        self.memory = (DeviceMemory if num_slots else MemfdMemory)(64, layout.block_bytes)
        self.ended: list[Lease] = []
        self.table = LeaseTable(layout.block_size, on_end=self._lease_ended)
        self.board = LeaseBoard(self.table, self.clock)
        self.area = StagingArea(num_slots, layout.block_bytes) if num_slots else None
        self.staging = Staging(self.memory, self.area, self.board, self.clock) if self.area else None
        self.shm = ShmServer(self.area or self.memory, self.incarnation) if shared else None
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="kv-read")
        self.tcp = TcpSource(self.memory, self.reader, self.incarnation, CLUSTER_TOKEN, silence_s=silence_s, tls=TLS)
        self.nixl = LateNixl(self.memory, self.reader, self.incarnation)
        self.transports: list[SourceEnd] = [self.tcp, GrpcSource(self.memory, self.reader)]
        if self.shm is not None:
            self.transports.insert(0, ShmSource(self.memory, self.shm, self.reader, staging=self.staging))
        self.cached: dict[BlockHash, int] = {}
        """The block of each hash in the prefix cache."""
        self.num_lent: Counter[int] = Counter()
        """References to lent blocks."""
        self.lender = Lender(
            self.table,
            self.clock,
            lend=self._lend,
            give_back=self.num_lent.subtract,
            block_size=layout.block_size,
            num_blocks=self.memory.num_blocks,
        )
        self.servicer = servicer(
            self.board,
            layout,
            self.incarnation,
            self.clock,
            transports=[*self.transports, self.nixl],
            lender=self.lender,
            silence_s=silence_s,
        )
        self.server = GrpcServer(token=CLUSTER_TOKEN)
        self.server.add(
            "baton.v1.KVTransferService",
            kvtransfer_pb2_grpc.add_KVTransferServiceServicer_to_server,
            self.servicer,
        )
        self._free = list(range(64))
        self._num_leases = 0
        self._seeds: dict[bytes, int] = {}  # by lease id: its block i is filled with content(seed + i)

    @property
    def where(self) -> types_pb2.KVSource:
        return types_pb2.KVSource(
            address=self.server.address,
            incarnation=self.incarnation,
            offers=[end.offer() for end in self.transports],
            layout=layout_to_proto(self.layout),
        )

    def lease(self, num_tokens: int, *, sealed: bool = False, owner: str = "session") -> Lease:
        """Returns a lease whose blocks are not written yet; with `sealed`, all are, and it is sealed."""
        self._num_leases += 1
        block_ids = [self._free.pop() for _ in range(self.layout.num_blocks(num_tokens))]
        lease = self.table.open(
            new_lease_id(),
            owner=owner,
            block_ids=block_ids,
            num_tokens=num_tokens,
            now=self.clock.now(),
        )
        self._seeds[lease.lease_id] = 100 * self._num_leases
        if sealed:
            self.seal(lease)
        return lease

    def cache(self, num_blocks: int) -> list[BlockHash]:
        """Adds a sequence's first blocks to the prefix cache, and returns their hashes. Block `i` has the content seed
        `i`."""
        hashes = block_hashes(range(num_blocks * self.layout.block_size), self.layout.block_size)
        for seed, hash in enumerate(hashes):
            self.cached[hash] = self._free.pop()
            self.memory.fill(self.cached[hash], seed)
        return hashes

    def _lend(self, hashes: Sequence[BlockHash]) -> list[int]:
        found = [self.cached[hash] for hash in takewhile(self.cached.__contains__, hashes)]
        self.num_lent.update(found)
        return found

    def _lease_ended(self, lease: Lease) -> None:
        self.ended.append(lease)
        if lease.listener is not None:
            lease.listener.lease_ended(lease)

    def publish(self, lease: Lease, num_tokens: int) -> None:
        self._compute(lease, num_tokens // self.layout.block_size)
        self.table.publish(lease.lease_id, num_tokens, self.clock.now())

    def seal(self, lease: Lease, token: types_pb2.SequenceTokens = TOKEN, *, finished: bool = False) -> None:
        self._compute(lease, lease.num_blocks)
        self.table.seal(lease.lease_id, token, self.clock.now(), finished=finished)

    def _compute(self, lease: Lease, upto: int) -> None:
        for index in range(lease.num_published, upto):
            self.memory.fill(lease.block_ids[index], self._seeds[lease.lease_id] + index)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.board.tick()

    def expected(self, lease: Lease, first_block: int = 0) -> list[bytes]:
        seed = self._seeds[lease.lease_id]
        return [content(seed + i, self.layout.block_bytes) for i in range(first_block, lease.num_blocks)]

    @property
    def num_kept_slots(self) -> int:
        """Returns how many slots are kept, those for fetches that stand in line included."""
        slots = self.staging.slots if self.staging else None
        return slots.num_slots - slots.num_free + slots.num_waiting if slots else 0

    def assert_idle(self) -> None:
        assert len(self.table) == 0
        assert self.table.num_fetches == 0
        if self.staging is not None:
            self.staging.slots.check()
        assert self.board.num_followers == 0
        assert len(self.ended) == len(set(self.ended)) == self._num_leases + self.lender.lends
        assert not +self.num_lent
        assert self.lender.num_lends == self.lender.num_lent_blocks == 0
        assert self.table.next_deadline() is None

    async def close(self) -> None:
        await self.server.stop()
        self.reader.shutdown()
        self.board.close()
        for end in (*self.transports, self.nixl):
            end.close()
        self.memory.close()


class Destination:
    """Is a worker that imports. Its import `n` gets fresh blocks."""

    def __init__(
        self,
        layout: Layout = LAYOUT,
        *,
        silence_s: float = HANG_S,
        dial: Callable[[str], grpc.aio.Channel] = dial,
        copy_threads: Executor | None = None,
        checksums: bool = False,
    ) -> None:
        self.clock = ManualClock()
        self.memory = MemfdMemory(64, layout.block_bytes)
        self.freed: list[Import] = []
        self.table = ImportTable(on_freed=self.freed.append)
        self.mappings = MappingCache(layout.block_bytes)
        self.sockets = TcpDestination(CLUSTER_TOKEN, silence_s=silence_s, tls=TLS)
        self.nixl = NixlDestination(self.memory, ucx=UCX, silence_s=silence_s)
        self.peers = Peers(dial, from_call, silence_s=silence_s)
        self.borrower = Borrower(self.peers, layout)
        self.fetcher = BlockFetcher(
            self.memory,
            layout,
            self.table,
            self.clock,
            transports=[self.mappings, self.nixl, GrpcDestination(layout.block_bytes), self.sockets],
            peers=self.peers,
            checksums=checksums,
            copy_threads=copy_threads,
        )
        self._free = list(range(64))

    def reserve(self, num_blocks: int) -> Import:
        return self.table.reserve([self._free.pop() for _ in range(num_blocks)], self.clock.now())

    def order(
        self,
        source: Source,
        lease: Lease,
        *,
        leg: int = 1,
        first_block: int = 0,
        transport: str = "auto",
    ) -> FetchOrder:
        """Makes an order with one block more than the prompt needs, as a decode worker reserves it. `transport`: none
        but that one is offered."""
        num_blocks = lease.num_blocks - first_block
        import_ = self.reserve(num_blocks + 1)
        where = source.where
        if transport != "auto":
            kind = types_pb2.Transport.Value(f"TRANSPORT_{transport.upper()}")
            offers = [end.offer() for end in (*source.transports, source.nixl) if end.transport == kind]
            where.ClearField("offers")
            where.offers.extend(offers)
        targets = import_.block_ids[:num_blocks]
        return FetchOrder(where, lease.lease_id, leg, import_, first_block, targets)

    async def fetch(self, source: Source, lease: Lease, **options: Any) -> FetchOutcome:
        return await self.fetcher.fetch(self.order(source, lease, **options))

    def start(self, order: FetchOrder) -> asyncio.Task[FetchOutcome]:
        return asyncio.create_task(self.fetcher.fetch(order))

    def return_blocks(self, order: FetchOrder) -> None:
        """Takes back the blocks of an import that was given up."""
        assert order.import_ in self.freed
        self._free += order.import_.block_ids

    def holds(self, block_ids: Sequence[int]) -> list[bytes]:
        return [bytes(block) for block in self.memory.read_blocks(block_ids)]

    def assert_idle(self) -> None:
        assert len(self.table) == 0
        assert len(self.freed) == len(set(self.freed))

    async def close(self) -> None:
        await self.borrower.close()
        await self.fetcher.close()
        await self.peers.close()
        self.memory.close()


@contextlib.asynccontextmanager
async def running(*parties: Source | Destination) -> AsyncIterator[None]:
    """Starts the servers; afterwards everything must have come to an end by itself: leases, imports, streams, copies,
    connections and tasks."""
    others = asyncio.all_tasks()
    for party in parties:
        if isinstance(party, Source):
            await party.server.start()
    try:
        yield
        for party in parties:
            if isinstance(party, Source):
                await until(lambda source=party: source.board.num_followers == 0)  # type: ignore[misc]
                await until(lambda source=party: source.num_kept_slots == 0)  # type: ignore[misc]
            else:  # blocks of a fetch that failed are free when the copy under way has ended
                await until(lambda destination=party: len(destination.table) == 0)  # type: ignore[misc]
            party.assert_idle()
    finally:
        # Destinations first: a source notices.
        for party in sorted(parties, key=lambda party: isinstance(party, Source)):
            if isinstance(party, Source) and party.shm is not None:
                await until(lambda shm=party.shm: shm.num_connections == 0)  # type: ignore[misc]
            if isinstance(party, Source):
                await until(lambda tcp=party.tcp: tcp.num_connections == 0)  # type: ignore[misc]
            await party.close()
    await until(lambda: not asyncio.all_tasks() - others)
    # A thread that nobody needs to wait for any more may still be on its way out.
    await until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("kv-")])


@contextlib.asynccontextmanager
async def raw_stub(source: Source) -> AsyncIterator[kvtransfer_pb2_grpc.KVTransferServiceStub]:
    """Returns a stub for what a well-behaved destination would never send."""
    async with dial(source.server.address) as channel:
        yield kvtransfer_pb2_grpc.KVTransferServiceStub(channel)


def opening(source: Source, lease_id: bytes, /, **fields: Any) -> kvtransfer_pb2.FetchRequest:
    opened = kvtransfer_pb2.FetchOpen(
        lease_id=lease_id,
        leg=1,
        transport=types_pb2.TRANSPORT_GRPC,
        layout=layout_to_proto(source.layout),
        source_incarnation=source.incarnation,
    )
    opened.MergeFrom(kvtransfer_pb2.FetchOpen(**fields))
    return kvtransfer_pb2.FetchRequest(open=opened)
