"""Fetches a handoff's blocks: the destination's side, from the open Fetch to the valid Release.

Owns: the copy threads, the channels, which of the offered transports is taken, and the order of steps: copy,
acknowledge, validate, only then READY. Never: which blocks are fetched, or what becomes of the sequence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from baton.v1 import kvtransfer_pb2, types_pb2
from services.core.clock import Clock, MonotonicClock
from services.core.errors import (
    Draining,
    LeaseInvalid,
    MalformedMessage,
    ProtocolViolation,
    StaleIncarnation,
    TransferFailed,
)
from services.core.timeouts import timeout_after
from services.kv.imports import Import, ImportTable
from services.kv.layout import Layout
from services.kv.regions import BlockMemory
from services.kvtransfer.channels import ChannelCache
from services.kvtransfer.checksums import verify
from services.kvtransfer.fetch_stream import ErrorOf, FetchStream, Seal, as_transfer_error
from services.kvtransfer.transports import Copier, DestinationEnd, TransportUnavailable
from services.kvtransfer.wire import layout_to_proto
from services.rpc.counting import FETCH_RESPONSE, RELEASE_RESPONSE

log = logging.getLogger(__name__)

# The answer to a Release may be lost with the connection; the source gives the same leg the same answer again.
_RELEASE_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class FetchOutcome:
    """Says what a fetch brought, and when. Times are in seconds on the fetcher's clock."""

    ready: bool
    """Whether the import is READY; if not, token 0 ended the sequence, and the import is dropped."""
    first_token: types_pb2.SequenceTokens
    num_tokens: int
    """How many tokens the lease's KV covers."""
    transport: types_pb2.Transport
    num_blocks: int
    num_bytes: int
    started_s: float
    first_copy_s: float | None
    """When the first copy began; None if nothing had to be copied."""
    sealed_s: float
    """When SEALED was received."""
    ended_s: float
    """When the Release was answered."""


def lease_may_live(error: BaseException) -> bool:
    """Returns whether another worker may still fetch the lease after a fetch that raised `error`."""
    return not isinstance(error, LeaseInvalid | StaleIncarnation | Draining)


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Describes one handoff to fetch."""

    source: types_pb2.KVSource
    lease_id: bytes
    leg: int
    import_: Import
    first_block: int
    """Index in the sequence of the first block that this worker lacks."""
    targets: Sequence[int]
    """This pool's blocks, all of them the import's, for the prompt's blocks from `first_block` to the last."""
    checksums: bool = False


class BlockFetcher:
    """Fetches leases into `memory`, each by the first of `transports` that its source offers and that works from here.

    `dial(address)` makes channels (rpc.channels.dial); `error_of(call error)` returns the error that a failed call
    stands for (rpc.status.from_call). `silence_s`, measured by `awake`, bounds each answer that the source owes at
    once and the time in which it says nothing, but not the prefill.
    """

    def __init__(
        self,
        memory: BlockMemory,
        layout: Layout,
        imports: ImportTable,
        clock: Clock,
        *,
        transports: Sequence[DestinationEnd],
        dial: Callable[[str], grpc.aio.Channel],
        error_of: ErrorOf,
        awake: Clock | None = None,
        silence_s: float = 5.0,
        copy_threads: Executor | None = None,
    ) -> None:
        self._memory = memory
        self._layout = layout
        self._imports = imports
        self._clock = clock
        self._error_of = error_of
        self._awake = awake or MonotonicClock()
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._channels = ChannelCache(dial)
        self._transports = transports
        self._copy_threads = copy_threads or ThreadPoolExecutor(1, thread_name_prefix="kv-copy")

    async def close(self) -> None:
        """Closes the transports and channels after copies under way have ended; then the memory may be closed.

        To be called after the last fetch has ended.
        """
        await asyncio.to_thread(self._copy_threads.shutdown)
        for end in self._transports:
            end.close()
        await self._channels.close()

    async def fetch(self, order: FetchOrder) -> FetchOutcome:
        """Runs the import to READY; the caller must pass its references on before the next await.

        When it raises, on cancellation too, the import is given up: it is FREED now, or when a copy under way ends. (A
        task that is cancelled before it ran does nothing, so its canceller also drains the import.) Raises
        LeaseInvalid, StaleIncarnation, LayoutMismatch, CorruptBlock, ProtocolViolation, TransferFailed, Draining if the
        source leaves, and Cancelled if the import was drained.
        """
        assert set(order.targets) <= set(order.import_.block_ids), "targets must be the import's"
        try:
            self._imports.begin(order.import_, self._clock.now())
            copier = await self._connect(order.source)
            copier.pin()
            try:
                with self._channels.use(order.source.address) as channel:
                    return await self._run(order, _Source(channel), copier)
            finally:
                copier.unpin()
        finally:
            self._imports.drain(order.import_, self._clock.now())  # no effect once READY

    async def _connect(self, source: types_pb2.KVSource) -> Copier:
        offers = {offer.transport: offer for offer in source.offers}
        ends = [end for end in self._transports if end.transport in offers]
        if not ends:
            raise TransportUnavailable("the source offers no transport that this worker pulls by")
        for end in ends[:-1]:
            try:
                return await end.connect(source, offers[end.transport])
            except TransportUnavailable as error:
                log.info("kv transfer from %s takes another transport: %s", source.address, error)
        return await ends[-1].connect(source, offers[ends[-1].transport])

    async def _run(self, order: FetchOrder, source: _Source, copier: Copier) -> FetchOutcome:
        started_s = self._clock.now()
        async with FetchStream(
            source.fetch(),
            self._clock,
            self._error_of,
            carried=copier.carried,
            awake=self._awake,
            silence_s=self._silence_s,
        ) as stream:
            await stream.open(self._opening(order, copier))
            progress = _Progress(order.first_block)
            seal = await self._pull(order, stream, copier, progress)
            if not seal.finished:
                self._imports.validate(order.import_, self._clock.now())
                await self._release(order, source)
            ended_s = self._clock.now()
        if not seal.finished:
            self._imports.ready(order.import_, ended_s)
        num_blocks = progress.copied - order.first_block
        return FetchOutcome(
            ready=not seal.finished,
            first_token=seal.first_token,
            num_tokens=seal.num_tokens,
            transport=copier.transport,
            num_blocks=num_blocks,
            num_bytes=num_blocks * self._memory.block_bytes,
            started_s=started_s,
            first_copy_s=progress.first_copy_s,
            sealed_s=seal.received_s,
            ended_s=ended_s,
        )

    def _opening(self, order: FetchOrder, copier: Copier) -> kvtransfer_pb2.FetchOpen:
        return kvtransfer_pb2.FetchOpen(
            lease_id=order.lease_id,
            leg=order.leg,
            first_block=order.first_block,
            transport=copier.transport,
            layout=layout_to_proto(self._layout),
            source_incarnation=order.source.incarnation,
            checksums=order.checksums,
        )

    async def _pull(self, order: FetchOrder, stream: FetchStream, copier: Copier, progress: _Progress) -> Seal:
        """Copies and acknowledges every announcement in order, and returns the seal. Raises ProtocolViolation.

        The last one is not acknowledged if the seal is here already: the Release, which follows at once, says the same.
        """
        end = order.first_block + len(order.targets)
        while not isinstance(item := await stream.next(), Seal):
            upto = progress.copied + copier.count(item)
            if item.first_block != progress.copied or not progress.copied < upto <= end:
                raise ProtocolViolation(f"announced {item.first_block}…{upto} after {progress.copied} of {end} blocks")
            targets = order.targets[progress.copied - order.first_block : upto - order.first_block]
            if len(item.checksums) != (len(targets) if order.checksums else 0):
                raise ProtocolViolation("checksums do not match what was asked for")
            if progress.first_copy_s is None:
                progress.first_copy_s = self._clock.now()
            await self._copy(order.import_, copier, item, targets)
            progress.copied = upto
            if not stream.only_seal_left:
                await stream.ack(upto)
        if not item.finished and (progress.copied != end or self._layout.num_blocks(item.num_tokens) != end):
            raise ProtocolViolation(f"sealed {item.num_tokens} tokens after {progress.copied} of {end} blocks")
        return item

    def _copy(
        self, import_: Import, copier: Copier, message: kvtransfer_pb2.FetchBlocks, targets: Sequence[int]
    ) -> asyncio.Future[None]:
        """Starts a copy, and returns a future of its end.

        Cancelling the future does not stop a copy that has begun: the import counts the copy until its thread is done
        with it, or until it was cancelled before a thread took it. Only then can the blocks be freed.
        """
        self._imports.copy_started(import_)
        copier.pin()
        copy = self._copy_threads.submit(self._write, copier, message, targets)
        copy.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._copy_ended, import_, copier))
        return asyncio.wrap_future(copy)

    def _write(self, copier: Copier, message: kvtransfer_pb2.FetchBlocks, targets: Sequence[int]) -> None:
        copier.copy(message, self._memory, targets)
        verify(self._memory, targets, message.checksums)

    def _copy_ended(self, import_: Import, copier: Copier) -> None:
        copier.unpin()
        self._imports.copy_ended(import_, self._clock.now())

    async def _release(self, order: FetchOrder, source: _Source) -> None:
        try:
            async with timeout_after(self._silence_s, self._awake):
                answer = await self._released(order, source)
        except TimeoutError:
            raise TransferFailed("the source does not answer the release") from None
        if not answer.valid:
            raise LeaseInvalid(answer.reason)

    async def _released(self, order: FetchOrder, source: _Source) -> kvtransfer_pb2.ReleaseResponse:
        request = kvtransfer_pb2.ReleaseRequest(lease_id=order.lease_id, leg=order.leg)
        for attempts_left in reversed(range(_RELEASE_ATTEMPTS)):
            try:
                answer: kvtransfer_pb2.ReleaseResponse | None = await source.release(request, wait_for_ready=True)
                if answer is None:
                    raise MalformedMessage("the bytes received are not an answer of Release")
                return answer
            except grpc.aio.AioRpcError as error:
                failure = as_transfer_error(error, self._error_of)
                if not attempts_left or not isinstance(failure, TransferFailed):
                    raise failure from error
        raise AssertionError("the last attempt returns or raises")


class _Source:
    """Calls the KVTransferService of a source, whose answers are counted before they are parsed."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.fetch: Any = channel.stream_stream(
            "/baton.v1.KVTransferService/Fetch",
            request_serializer=kvtransfer_pb2.FetchRequest.SerializeToString,
            response_deserializer=FETCH_RESPONSE.parse_or_none,
        )
        self.release: Any = channel.unary_unary(
            "/baton.v1.KVTransferService/Release",
            request_serializer=kvtransfer_pb2.ReleaseRequest.SerializeToString,
            response_deserializer=RELEASE_RESPONSE.parse_or_none,
        )


@dataclass(slots=True)
class _Progress:
    copied: int
    """The import has all blocks before this index of the sequence."""
    first_copy_s: float | None = None
