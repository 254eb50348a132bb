"""Tests that two memories of blocks hand over to each other through their endpoints, with no engine and no worker."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from baton.v1 import types_pb2
from services.core.clock import ManualClock
from services.core.hashing import BlockHash, block_hashes
from services.core.ids import new_incarnation, new_lease_id
from services.kv.imports import Import, ImportTable
from services.kv.lease import Lease, LeaseState
from services.kv.lease_table import LeaseTable
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.client import FetchOrder
from services.kvtransfer.endpoint import KVEndpoint
from services.kvtransfer.transports.grpc import GrpcDestination, GrpcSource
from services.kvtransfer.wire import layout_to_proto
from services.rpc.serving import GrpcServer
from tests.support.kv_harness import LAYOUT, TOKEN
from tests.support.kv_memory import MemfdMemory, content
from tests.support.trusted import CLUSTER_TOKEN, dial

NUM_BLOCKS = 16


class Store:
    """Has blocks in memory, and nothing that computes. What it lends are its first blocks."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.incarnation = new_incarnation()
        self.memory = MemfdMemory(NUM_BLOCKS, LAYOUT.block_bytes)
        self.given_back: list[int] = []
        self.freed: list[Import] = []
        self.leases = LeaseTable(LAYOUT.block_size, on_end=self._ended)
        self.imports = ImportTable(on_freed=self.freed.append)
        self.board = LeaseBoard(self.leases, self.clock)
        reader = ThreadPoolExecutor(1, thread_name_prefix="kv-read")
        self.endpoint = KVEndpoint(
            self.memory,
            LAYOUT,
            self.board,
            self.imports,
            incarnation=self.incarnation,
            clock=self.clock,
            awake=self.clock,
            sources=[GrpcSource(self.memory, reader)],
            destinations=[GrpcDestination(LAYOUT.block_bytes)],
            dial=dial,
            lend=self._lend,
            give_back=self.given_back.extend,
            reader=reader,
            checksums=True,
        )
        self.server = GrpcServer(token=CLUSTER_TOKEN)
        self.endpoint.register(self.server)

    def _lend(self, hashes: Sequence[BlockHash]) -> list[int]:
        return list(range(len(hashes)))

    def _ended(self, lease: Lease) -> None:
        if lease.listener is not None:
            lease.listener.lease_ended(lease)

    @property
    def where(self) -> types_pb2.KVSource:
        return types_pb2.KVSource(
            address=self.server.address,
            incarnation=self.incarnation,
            offers=self.endpoint.offers,
            layout=layout_to_proto(LAYOUT),
        )

    async def close(self) -> None:
        await self.server.stop()
        await self.endpoint.close()
        self.board.close()
        self.memory.close()


async def test_a_lease_and_a_loan_are_fetched() -> None:
    source, destination = Store(), Store()
    try:
        await source.server.start()
        assert source.endpoint.summary == "pulls by grpc only, offers grpc"
        for block_id in range(NUM_BLOCKS):
            source.memory.fill(block_id, block_id)
        lease = source.leases.open(
            new_lease_id(), owner="test", block_ids=[4, 7], num_tokens=20, now=source.clock.now()
        )
        source.leases.seal(lease.lease_id, TOKEN, source.clock.now())
        order = FetchOrder(source.where, lease.lease_id, 1, destination.imports.reserve([3, 1], 0.0), 0, [3, 1])
        assert (await destination.endpoint.fetcher.fetch(order)).ready
        assert lease.state is LeaseState.RELEASED
        assert _held(destination, [3, 1]) == [content(4, LAYOUT.block_bytes), content(7, LAYOUT.block_bytes)]

        hashes = block_hashes(range(2 * LAYOUT.block_size), LAYOUT.block_size)
        loan = await destination.endpoint.borrower.borrow(source.where, hashes)
        assert loan is not None
        assert loan.num_blocks == 2
        order = FetchOrder(loan.source, loan.lease_id, 1, destination.imports.reserve([5, 6], 0.0), 0, [5, 6])
        assert (await destination.endpoint.fetcher.fetch(order)).ready
        assert _held(destination, [5, 6]) == [content(0, LAYOUT.block_bytes), content(1, LAYOUT.block_bytes)]
        assert source.given_back == [0, 1]
        assert not destination.freed
    finally:
        await destination.close()
        await source.close()


def _held(store: Store, block_ids: list[int]) -> list[bytes]:
    return [bytes(block) for block in store.memory.read_blocks(block_ids)]
