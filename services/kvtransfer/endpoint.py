"""Serves the blocks of one memory to others, and fetches blocks of theirs into it.

Owns: the transfer service, the fetcher, the lender and the borrower of that memory, and their order of closing. Never:
an engine, how a transport works (`transports`), a rule about leases or imports (`services.kv`), or whose blocks they
are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor

import grpc

from baton.v1 import kvtransfer_pb2_grpc, types_pb2
from services.core.clock import Clock
from services.core.hashing import BlockHash
from services.kv.imports import ImportTable
from services.kv.layout import Layout
from services.kv.regions import BlockMemory
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.borrowing import Borrower
from services.kvtransfer.client import BlockFetcher
from services.kvtransfer.lending import Lender
from services.kvtransfer.peers import Peers
from services.kvtransfer.servicer import KVTransferServicer
from services.kvtransfer.transports import DestinationEnd, SourceEnd, offers_of
from services.rpc.plain import enum_word
from services.rpc.serving import GrpcServer
from services.rpc.status import from_call

TRANSFER_SERVICE = "baton.v1.KVTransferService"


class KVEndpoint:
    """Has both ends of the transfers of `memory`, whose blocks are of `layout`. Make it on the event loop."""

    def __init__(
        self,
        memory: BlockMemory,
        layout: Layout,
        board: LeaseBoard,
        imports: ImportTable,
        *,
        incarnation: int,
        clock: Clock,
        awake: Clock,
        sources: Sequence[SourceEnd],
        destinations: Sequence[DestinationEnd],
        dial: Callable[[str], grpc.aio.Channel],
        lend: Callable[[Sequence[BlockHash]], list[int]],
        give_back: Callable[[Sequence[int]], None],
        reader: Executor,
        checksums: bool,
        copy_threads: Executor | None = None,
    ) -> None:
        """`sources` are the transports by which others may fetch, and read on `reader`; `destinations` are those by
        which this side fetches, the best first. `lend` and `give_back` are those of `Lender`. `clock` times fetches;
        `awake`, the board's clock, is that by which others are judged. `checksums` has what is fetched checked."""
        self.layout = layout
        self.sources = sources
        self._destinations = destinations
        self._reader = reader
        self.lender = Lender(
            board.table,
            awake,
            lend=lend,
            give_back=give_back,
            block_size=layout.block_size,
            num_blocks=memory.num_blocks,
        )
        self._servicer = KVTransferServicer(
            board, layout, incarnation, awake, transports=sources, lender=self.lender, awake=awake
        )
        self._peers = Peers(dial, from_call, awake=awake)
        self.borrower = Borrower(self._peers, layout)
        self.fetcher = BlockFetcher(
            memory,
            layout,
            imports,
            clock,
            transports=destinations,
            peers=self._peers,
            checksums=checksums,
            copy_threads=copy_threads,
        )

    @property
    def offers(self) -> list[types_pb2.KVOffer]:
        """Returns what others must know to fetch from here, for each transport."""
        return offers_of(self.sources, self.layout)

    @property
    def summary(self) -> str:
        """Returns how this side fetches and what it offers, in words for the log."""
        names = [enum_word(types_pb2.Transport.DESCRIPTOR, end.transport) for end in self._destinations]
        pulls_by = ", else ".join(names) if len(names) > 1 else f"{names[0]} only"
        return f"pulls by {pulls_by}, offers {' and '.join(end.description for end in self.sources)}"

    def register(self, server: GrpcServer) -> None:
        server.add(TRANSFER_SERVICE, kvtransfer_pb2_grpc.add_KVTransferServiceServicer_to_server, self._servicer)

    def keep_for_others(self, keep: Callable[[types_pb2.KVSource, list[BlockHash]], int]) -> None:
        """Has blocks that others offer kept here: `keep(source, hashes)` returns how many are wanted."""
        self._servicer.keep = keep

    def recall_before_lending(self, recall: Callable[[list[BlockHash]], Awaitable[None]]) -> None:
        """Has `recall(hashes)` awaited before blocks are lent, which brings those to the pool that are below it."""
        self._servicer.recall = recall

    def leave(self) -> None:
        """Notes that this process leaves: fetches of leases that are aborted from now on get Draining as the reason."""
        self._servicer.leave()

    async def close(self) -> None:
        """Closes both ends. Call it after the server has stopped; afterwards nothing reads or writes the memory."""
        self.lender.close()
        await self.borrower.close()
        await self.fetcher.close()
        await self._peers.close()
        self._reader.shutdown()
        for end in self.sources:
            end.close()
