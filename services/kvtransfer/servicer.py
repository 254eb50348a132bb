"""Serves the leases of one worker's pool, as the KVTransferService.

Owns: the streams of open fetches. It is a thin shell over `LeaseBoard` and a transport's source end: the lease table
decides. It raises BatonErrors, which the host's interceptor turns into statuses. Never: opens, publishes or seals a
lease.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc

from baton.v1 import kvtransfer_pb2, kvtransfer_pb2_grpc, types_pb2
from services.core.clock import Clock, MonotonicClock, timeout_after
from services.core.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    LayoutMismatch,
    LeaseInvalid,
    ProtocolViolation,
    StaleIncarnation,
    TransferFailed,
)
from services.core.hashing import BlockHash
from services.kv.layout import Layout
from services.kv.lease import FetchEnd, FetchTicket, LeaseState
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.lending import Lender
from services.kvtransfer.transports import Announcer, SourceEnd, offers_of
from services.kvtransfer.wire import layout_from_proto, split_hashes
from services.rpc.interceptors import CallContext

Requests: TypeAlias = AsyncIterator[kvtransfer_pb2.FetchRequest]

ALIVE_EVERY_S = 1.0
"""Seconds without another message after which a destination is told that its source is there."""
_LEASE_ID_BYTES = 16


class KVTransferServicer(kvtransfer_pb2_grpc.KVTransferServiceServicer):
    """Answers Fetch, Release and Lend.

    `transports` are those that this worker offers; `lender` lends of its prefix cache, None if there is none.
    `silence_s` bounds the wait for a client's first message, and for a client that does not read what it is sent; it is
    measured by `awake`. `clock` is the board's.
    """

    def __init__(
        self,
        board: LeaseBoard,
        layout: Layout,
        incarnation: int,
        clock: Clock,
        *,
        transports: Sequence[SourceEnd],
        lender: Lender | None = None,
        awake: Clock | None = None,
        silence_s: float = 5.0,
    ) -> None:
        self._board = board
        self._lender = lender
        self._layout = layout
        self._incarnation = incarnation
        self._clock = clock
        self._ends = {end.transport: end for end in transports}
        self._awake = awake or MonotonicClock()
        self._silence_s = silence_s
        self.keep: Callable[[types_pb2.KVSource, list[BlockHash]], int] | None = None
        """Begins to fetch blocks that others offer, and returns how many are wanted; only a store does."""
        self.recall: Callable[[list[BlockHash]], Awaitable[None]] | None = None
        """Brings blocks from below the pool as far as it can, so that they can be lent; it raises nothing."""
        self._leaving = False

    def leave(self) -> None:
        """Notes that this worker leaves: calls for leases that are aborted from now on get Draining as the reason."""
        self._leaving = True

    async def Fetch(self, requests: Requests, context: CallContext) -> None:
        opened = await self._read_open(requests)
        ticket = self._board.table.open_fetch(opened.lease_id, opened.leg, opened.first_block, self._clock.now())
        announcer = self._ends[opened.transport].announcer(ticket, checksums=opened.checksums)
        with self._board.follow(ticket) as changed:
            acks = asyncio.create_task(self._take_acks(ticket, requests), name="kv-acks")
            acks.add_done_callback(lambda _: changed.set())
            try:
                # Tells the destination that the fetch is open, however long the first block takes.
                await self._bounded(context.send_initial_metadata(()))
                await self._serve(_Followed(ticket, changed, acks), announcer, context)
            except LeaseInvalid as error:
                if self._leaving and ticket.ended is FetchEnd.ABORTED:
                    raise Draining(f"{error}: its worker leaves") from error
                raise
            finally:
                acks.cancel()
                await asyncio.wait([acks])
                if not acks.cancelled():
                    acks.exception()  # marks it as retrieved: `_serve` has raised this error, or another

    async def Release(
        self, request: kvtransfer_pb2.ReleaseRequest, context: CallContext
    ) -> kvtransfer_pb2.ReleaseResponse:
        _check_lease_id("lease_id", request.lease_id)
        answer = self._board.table.release(request.lease_id, request.leg, self._clock.now())
        if not answer.valid and self._leaving:
            raise Draining(f"{answer.reason}: its worker leaves")
        return kvtransfer_pb2.ReleaseResponse(valid=answer.valid, reason=answer.reason)

    async def Lend(self, request: kvtransfer_pb2.LendRequest, context: CallContext) -> kvtransfer_pb2.LendResponse:
        self._check_peer(request.source_incarnation, request.layout)
        hashes = split_hashes("hashes", request.hashes)
        if self.recall is not None and not self._leaving:
            await self.recall(hashes)
        if self._leaving:
            raise Draining("this worker leaves")
        if self._lender is None:
            return kvtransfer_pb2.LendResponse()
        offers = offers_of(self._ends.values(), self._layout)  # first: if this fails, nothing is lent
        lease = self._lender.lend(hashes)
        if lease is None:
            return kvtransfer_pb2.LendResponse()
        return kvtransfer_pb2.LendResponse(num_blocks=lease.num_blocks, lease_id=lease.lease_id, offers=offers)

    async def Keep(self, request: kvtransfer_pb2.KeepRequest, context: CallContext) -> kvtransfer_pb2.KeepResponse:
        if self.keep is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this is no store")
        assert self.keep is not None
        if self._leaving:
            raise Draining("this store leaves")
        mismatch = self._layout.mismatch(layout_from_proto(request.source.layout))
        if mismatch is not None:
            raise LayoutMismatch(mismatch)
        hashes = split_hashes("hashes", request.hashes)
        return kvtransfer_pb2.KeepResponse(num_wanted=self.keep(request.source, hashes))

    async def _read_open(self, requests: Requests) -> kvtransfer_pb2.FetchOpen:
        try:
            async with timeout_after(self._silence_s, self._awake):
                first = await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded("a fetch must open with its first message") from None
        if first is None or first.WhichOneof("message") != "open":
            raise ProtocolViolation("a fetch starts with open")
        opened = first.open
        _check_lease_id("open.lease_id", opened.lease_id)
        self._check_peer(opened.source_incarnation, opened.layout)
        if opened.transport not in self._ends:
            raise InvalidRequest("open.transport", "is none that this source offers")
        return opened

    def _check_peer(self, source_incarnation: int, layout: types_pb2.KVLayout) -> None:
        """Raises StaleIncarnation or LayoutMismatch unless the caller means this process and has its layout."""
        if source_incarnation != self._incarnation:
            raise StaleIncarnation("this worker has restarted since the caller heard of it")
        mismatch = self._layout.mismatch(layout_from_proto(layout))
        if mismatch is not None:
            raise LayoutMismatch(mismatch)

    async def _take_acks(self, ticket: FetchTicket, requests: Requests) -> None:
        async for request in requests:
            if request.WhichOneof("message") != "ack":
                raise ProtocolViolation("open comes first and only then")
            self._board.table.ack(ticket, request.ack.copied_blocks, self._clock.now())

    async def _serve(self, followed: _Followed, announcer: Announcer, context: CallContext) -> None:
        """Announces blocks as they are published and find room, then sends the seal; ends with the fetch."""
        lease, sent = followed.ticket.lease, followed.ticket.first_block
        clock = asyncio.get_running_loop().time
        said_s = clock()
        while not followed.over:
            num_left = max(0, lease.num_published - sent)
            if room := announcer.room(sent, num_left) if num_left else 0:
                announced = await announcer.announce(sent, lease.block_ids[sent : sent + room])
                if followed.over:
                    break
                sent += room
                self._board.table.announce(followed.ticket, sent, self._clock.now())
                message = announced if isinstance(announced, bytes) else kvtransfer_pb2.FetchResponse(blocks=announced)
                await self._bounded(context.write(message))
                said_s = clock()
            elif not num_left and lease.state is LeaseState.SEALED:
                break
            elif clock() >= said_s + ALIVE_EVERY_S:
                await self._bounded(context.write(kvtransfer_pb2.FetchResponse(alive=kvtransfer_pb2.FetchAlive())))
                said_s = clock()
            else:  # not each change is a block that can be announced, so changes alone say nothing to the destination
                await followed.change(said_s + ALIVE_EVERY_S - clock())
        if followed.ticket.ended is FetchEnd.RELEASED:
            return
        sealed = kvtransfer_pb2.FetchSealed(
            num_tokens=lease.num_tokens,
            first_token=lease.first_token,
            other_first_tokens=lease.other_first_tokens,
        )
        await self._bounded(context.write(kvtransfer_pb2.FetchResponse(sealed=sealed)))
        while not followed.over:
            await followed.change()

    async def _bounded(self, sending: Any) -> None:
        try:
            async with timeout_after(self._silence_s, self._awake):
                await sending
        except TimeoutError:
            raise TransferFailed("the destination does not read what it is sent") from None


class _Followed:
    """Keeps what a stream waits for: changes of its fetch, and the end of the acknowledgements."""

    def __init__(self, ticket: FetchTicket, changed: asyncio.Event, acks: asyncio.Task[None]) -> None:
        self.ticket = ticket
        self._changed = changed
        self._acks = acks

    @property
    def over(self) -> bool:
        """Returns whether the fetch has ended well.

        Raises TransferFailed if it stalled, LeaseInvalid if it failed otherwise, and the error of an acknowledgement.
        """
        if self._acks.done():  # if it has no error, the client sends no more, and the stall clock judges that
            self._acks.result()
        ended = self.ticket.ended
        if ended is FetchEnd.STALLED:  # another leg may still fetch the lease
            raise TransferFailed(ended.value)
        if ended is not None and ended.broken:
            raise LeaseInvalid(ended.value)
        return ended is not None

    async def change(self, within_s: float | None = None) -> None:
        """Waits for a change of the fetch since the last call, for at most the given seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._changed.wait()
                self._changed.clear()


def _check_lease_id(field: str, lease_id: bytes) -> None:
    if len(lease_id) != _LEASE_ID_BYTES:
        raise InvalidRequest(field, f"{len(lease_id)} bytes instead of {_LEASE_ID_BYTES}")
