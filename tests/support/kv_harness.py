"""A source and a destination as a worker would put them together: real servers on port 0, real memfds, no engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from baton.v1 import kvtransfer_pb2, kvtransfer_pb2_grpc, types_pb2
from services.core.clock import ManualClock
from services.core.ids import new_incarnation, new_lease_id
from services.core.sealed_memory import SealedMemory
from services.kv.imports import Import, ImportTable
from services.kv.layout import Layout
from services.kv.lease import Lease
from services.kv.lease_table import LeaseTable
from services.kv.regions import Buffer, Region
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.client import BlockFetcher, FetchOrder, FetchOutcome
from services.kvtransfer.servicer import KVTransferServicer
from services.kvtransfer.transports import SourceEnd
from services.kvtransfer.transports.grpc import GrpcDestination, GrpcSource
from services.kvtransfer.transports.shm import ShmServer
from services.kvtransfer.transports.shm_mapping import MappingCache
from services.kvtransfer.transports.shm_source import ShmSource
from services.kvtransfer.transports.staging import Staging, StagingArea
from services.kvtransfer.wire import layout_to_proto
from services.rpc.serving import GrpcServer
from services.rpc.status import from_call
from tests.support.trusted import CLUSTER_TOKEN, dial

PATIENCE_S = 10.0
"""Far beyond what anything here takes: reached only by a hang."""

LAYOUT = Layout("tiny", "weights", "config", "float32", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16)
TOKEN = types_pb2.SequenceTokens(leg=1, position=0, token_ids=[42])


class Gate:
    """Stops writers until it is opened."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._open = threading.Event()

    def enter(self) -> None:
        self._entered.set()
        assert self._open.wait(PATIENCE_S)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.wait, PATIENCE_S)

    def open(self) -> None:
        self._open.set()


class MemfdMemory:
    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._memory = SealedMemory("baton-test", num_blocks * block_bytes)
        self.fd = self._memory.fd
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._map = self._memory.map
        self._region = Region(self._memory.address, num_blocks * block_bytes, "cpu")
        self.gate: Gate | None = None
        self.corrupts = False

    def region(self, block_id: int) -> Region:
        return self._region.part(block_id * self.block_bytes, self.block_bytes)

    def block(self, block_id: int) -> memoryview:
        return memoryview(self._map)[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        return [self.block(block_id) for block_id in block_ids]

    def copy_blocks(self, block_ids: Sequence[int], targets: Sequence[memoryview]) -> None:
        for block_id, target in zip(block_ids, targets, strict=True):
            with self.block(block_id) as block:
                target[:] = block

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        if self.gate is not None:
            self.gate.enter()
        for block_id, each in zip(block_ids, data, strict=True):
            with self.block(block_id) as block:
                block[:] = each
                if self.corrupts:
                    block[self.block_bytes // 2] ^= 1

    def fill(self, block_id: int, seed: int) -> None:
        with self.block(block_id) as block:
            block[:] = content(seed, self.block_bytes)

    def close(self) -> None:
        self._map.release()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class DeviceMemory(MemfdMemory):
    """Stands for a pool on a GPU: no peer can map it."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        super().__init__(num_blocks, block_bytes)
        assert self.fd is not None
        os.close(self.fd)
        self.fd = None
        self.read_gate: Gate | None = None

    def copy_blocks(self, block_ids: Sequence[int], targets: Sequence[memoryview]) -> None:
        if self.read_gate is not None:
            self.read_gate.enter()
        super().copy_blocks(block_ids, targets)


def content(seed: int, num_bytes: int) -> bytes:
    return (seed.to_bytes(4, "big") * (num_bytes // 4 + 1))[:num_bytes]


async def until(predicate: Callable[[], bool]) -> None:
    """Returns when the predicate holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not predicate():  # noqa: ASYNC110  (of all that runs here; there is no single event)
            await asyncio.sleep(0.001)


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
        silence_s: float = PATIENCE_S,
    ) -> None:
        self.clock = ManualClock()
        self.layout = layout
        self.incarnation = new_incarnation()
        self.memory = (DeviceMemory if num_slots else MemfdMemory)(64, layout.block_bytes)
        self.ended: list[Lease] = []
        self.table = LeaseTable(layout.block_size, on_end=self.ended.append)
        self.board = LeaseBoard(self.table, self.clock)
        self.area = StagingArea(num_slots, layout.block_bytes) if num_slots else None
        self.staging = Staging(self.memory, self.area, self.board, self.clock) if self.area else None
        self.shm = ShmServer(self.area or self.memory, self.incarnation) if shared else None
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="kv-read")
        self.transports: list[SourceEnd] = [GrpcSource(self.memory, self.reader)]
        if self.shm is not None:
            self.transports.insert(0, ShmSource(self.memory, self.shm, self.reader, staging=self.staging))
        self.servicer = servicer(
            self.board, layout, self.incarnation, self.clock, transports=self.transports, silence_s=silence_s
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
        assert len(self.ended) == len(set(self.ended)) == self._num_leases
        assert self.table.next_deadline() is None

    async def close(self) -> None:
        await self.server.stop()
        self.reader.shutdown()
        self.board.close()
        for end in self.transports:
            end.close()
        self.memory.close()


class Destination:
    """Is a worker that imports. Its import `n` gets fresh blocks."""

    def __init__(
        self,
        layout: Layout = LAYOUT,
        *,
        silence_s: float = PATIENCE_S,
        dial: Callable[[str], grpc.aio.Channel] = dial,
    ) -> None:
        self.clock = ManualClock()
        self.memory = MemfdMemory(64, layout.block_bytes)
        self.freed: list[Import] = []
        self.table = ImportTable(on_freed=self.freed.append)
        self.mappings = MappingCache(layout.block_bytes)
        self.fetcher = BlockFetcher(
            self.memory,
            layout,
            self.table,
            self.clock,
            transports=[self.mappings, GrpcDestination(layout.block_bytes)],
            dial=dial,
            error_of=from_call,
            silence_s=silence_s,
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
        checksums: bool = False,
    ) -> FetchOrder:
        """Makes an order with one block more than the prompt needs, as a decode worker reserves it. `transport`: none
        but that one is offered."""
        num_blocks = lease.num_blocks - first_block
        import_ = self.reserve(num_blocks + 1)
        where = source.where
        if transport != "auto":
            kind = types_pb2.Transport.Value(f"TRANSPORT_{transport.upper()}")
            offers = [offer for offer in source.where.offers if offer.transport == kind]
            where.ClearField("offers")
            where.offers.extend(offers)
        targets = import_.block_ids[:num_blocks]
        return FetchOrder(where, lease.lease_id, leg, import_, first_block, targets, checksums)

    async def fetch(self, source: Source, lease: Lease, **options: Any) -> FetchOutcome:
        return await self.fetcher.fetch(self.order(source, lease, **options))

    def start(self, order: FetchOrder) -> asyncio.Task[FetchOutcome]:
        return asyncio.create_task(self.fetcher.fetch(order))

    def holds(self, block_ids: Sequence[int]) -> list[bytes]:
        return [bytes(block) for block in self.memory.read_blocks(block_ids)]

    def assert_idle(self) -> None:
        assert len(self.table) == 0
        assert len(self.freed) == len(set(self.freed))

    async def close(self) -> None:
        await self.fetcher.close()
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
            party.assert_idle()
    finally:
        # Destinations first: a source notices.
        for party in sorted(parties, key=lambda party: isinstance(party, Source)):
            if isinstance(party, Source) and party.shm is not None:
                await until(lambda shm=party.shm: shm.num_connections == 0)  # type: ignore[misc]
            await party.close()
    await until(lambda: not asyncio.all_tasks() - others)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


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
