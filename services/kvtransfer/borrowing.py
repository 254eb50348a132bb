"""Borrows blocks of other workers' prefix caches, and offers this worker's to stores.

Owns: loans that were asked for, until somebody fetches them or they are given back. Never: how their blocks travel, or
which are wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.v1 import kvtransfer_pb2, types_pb2
from services.core.errors import BatonError, ProtocolViolation
from services.core.hashing import BlockHash
from services.kv.layout import Layout
from services.kvtransfer.peers import Peers
from services.kvtransfer.wire import join_hashes, layout_to_proto

T = TypeVar("T")

LOAN_LEG = 1
"""The leg by which a loan is fetched or given back. Only whoever borrowed it knows of it, so it needs no other."""
_RETURNED_WITHIN_S = 1.0
"""How long a borrower that closes waits for the loans that are being given back."""
_LEASE_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Loan:
    """Names blocks of a source's prefix cache that it has leased out to this worker."""

    source: types_pb2.KVSource
    lease_id: bytes
    num_blocks: int
    """How many of the blocks that were asked for it covers, from the first on."""


class Borrower:
    """Asks `peers` for blocks of `layout`. Make it on the event loop, and close it when nobody borrows any more."""

    def __init__(self, peers: Peers, layout: Layout) -> None:
        self._peers = peers
        self._layout = layout
        self._calls: set[asyncio.Task[Any]] = set()
        """Calls by which loans are asked for, and given back."""

    async def borrow(self, source: types_pb2.KVSource, hashes: Sequence[BlockHash]) -> Loan | None:
        """Asks the source for blocks of its prefix cache; returns what it lends, None if it has not even the first.

        What is lent is fetched as a handoff is, as LOAN_LEG, or given back by `give_back`; else it is the source's
        again when its time to live is over. When this call is cancelled, its answer is awaited all the same, and what
        it lends given back. Raises what the source does, TransferFailed and ProtocolViolation.
        """
        asking = self._own(self._ask(source, hashes), "borrow")
        try:
            await asyncio.wait([asking])  # which does not cancel it
        except asyncio.CancelledError:
            asking.add_done_callback(self._give_back_answer)
            raise
        return asking.result()

    async def _ask(self, source: types_pb2.KVSource, hashes: Sequence[BlockHash]) -> Loan | None:
        request = kvtransfer_pb2.LendRequest(
            source_incarnation=source.incarnation, layout=layout_to_proto(self._layout), hashes=join_hashes(hashes)
        )
        with self._peers.use(source.address) as peer:
            answer = await self._peers.answer(peer.Lend(request), "does not say what it lends")
        if not answer.num_blocks:
            return None
        if not 0 < answer.num_blocks <= len(hashes) or len(answer.lease_id) != _LEASE_ID_BYTES:
            raise ProtocolViolation(
                f"lends {answer.num_blocks} of {len(hashes)} blocks, by {len(answer.lease_id)} bytes"
            )
        if answer.offers:
            where, source = source, types_pb2.KVSource()
            source.CopyFrom(where)
            del source.offers[:]
            source.offers.extend(answer.offers)
        return Loan(source, answer.lease_id, answer.num_blocks)

    async def offer(self, store: types_pb2.KVSource, source: types_pb2.KVSource, hashes: Sequence[BlockHash]) -> int:
        """Tells a store that it may have blocks of `source`, this worker, and returns how many it will fetch.

        Raises what the store does, and TransferFailed."""
        request = kvtransfer_pb2.KeepRequest(source=source, hashes=join_hashes(hashes))
        with self._peers.use(store.address) as peer:
            answer = await self._peers.answer(peer.Keep(request), "does not say what it keeps")
        return int(answer.num_wanted)

    def give_back(self, loan: Loan) -> None:
        """Begins to end the lease of what was borrowed and is not wanted. If that fails, it ends by itself."""
        self._own(self._release_loan(loan), "give back")

    async def _release_loan(self, loan: Loan) -> None:
        request = kvtransfer_pb2.ReleaseRequest(lease_id=loan.lease_id, leg=LOAN_LEG)
        with contextlib.suppress(BatonError), self._peers.use(loan.source.address) as peer:
            await self._peers.answer(peer.Release(request), "takes nothing back")

    def _give_back_answer(self, asking: asyncio.Task[Loan | None]) -> None:
        """Gives back what was lent to somebody who is gone."""
        if not asking.cancelled() and asking.exception() is None and (loan := asking.result()) is not None:
            self.give_back(loan)

    def _own(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=f"kv-{name}")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def close(self) -> None:
        """Ends calls under way. Loans that are being given back have a second for that."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + _RETURNED_WITHIN_S
        while self._calls and (left_s := until_s - clock()) > 0:
            await asyncio.wait(self._calls, timeout=left_s)
        while self._calls:
            for task in self._calls:
                task.cancel()
            await asyncio.wait(self._calls)
