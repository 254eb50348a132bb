"""Fetches a handoff's blocks: the destination's side, from the open Fetch to the valid Release.

Owns: the copy threads, and the order of steps: copy, acknowledge, validate, only then READY. Never: which blocks are
fetched, by which transport (`connecting`), or what becomes of the sequence.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from baton.v1 import kvtransfer_pb2, types_pb2
from services.core.clock import Clock
from services.core.daemon_threads import DaemonThreads
from services.core.errors import (
    Draining,
    LeaseInvalid,
    ProtocolViolation,
    StaleIncarnation,
    TransferFailed,
)
from services.kv.imports import Import, ImportTable
from services.kv.layout import Layout
from services.kv.regions import BlockMemory
from services.kvtransfer.checksums import verify
from services.kvtransfer.connecting import Connector
from services.kvtransfer.fetch_stream import FetchStream, Seal, as_transfer_error
from services.kvtransfer.peers import Peers
from services.kvtransfer.transports import Copier, DestinationEnd, FetchName
from services.kvtransfer.wire import Announced, layout_to_proto

T = TypeVar("T")

log = logging.getLogger(__name__)

_ACK_BYTES = 16 << 20
"""How much is copied before it is acknowledged, while messages that carry blocks follow one another."""


@dataclass(frozen=True, slots=True)
class FetchOutcome:
    """Says what a fetch brought, and when. Times are in seconds on the fetcher's clock."""

    ready: bool
    """Whether the import is READY; if not, token 0 ended every answer, and the import is dropped."""
    first_token: types_pb2.SequenceTokens
    other_first_tokens: tuple[types_pb2.SequenceTokens, ...]
    """Those of further answers."""
    num_tokens: int
    """How many tokens the lease's KV covers."""
    transport: types_pb2.Transport
    num_blocks: int
    num_bytes: int
    num_not_moved: int
    """How many of the lease's blocks did not cross, since the destination had them."""
    started_s: float
    first_copy_s: float | None
    """When the first copy began; None if nothing had to be copied."""
    copy_s: float
    """How long copies were under way, all together. What came between them is not in it. Where messages carry the
    blocks it is how long these take (`FetchStream.carrying_s`); 0 if that is not known."""
    sealed_s: float
    """When SEALED was received."""
    ended_s: float
    """When the Release was answered."""

    @property
    def began_s(self) -> float:
        """Returns when the first copy began, or the seal came if that was earlier, as of a short prompt, or if nothing
        had to be copied."""
        return self.sealed_s if self.first_copy_s is None else min(self.first_copy_s, self.sealed_s)


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


class BlockFetcher:
    """Fetches leases into `memory`, each by one of `transports` that its source offers.

    With `checksums` no block is used that is not what its source had.
    Copies of one fetch never wait for those of another, each of which has as many threads as it has copies at once.
    The silence of `peers` bounds each answer that the source owes at once and the time in which it says nothing, but
    not the prefill.
    """

    def __init__(
        self,
        memory: BlockMemory,
        layout: Layout,
        imports: ImportTable,
        clock: Clock,
        *,
        transports: Sequence[DestinationEnd],
        peers: Peers,
        checksums: bool,
        copy_threads: Executor | None = None,
    ) -> None:
        self._memory = memory
        self._layout = layout
        self._imports = imports
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._peers = peers
        self._checksums = checksums
        self._connector = Connector(transports, layout, awake=peers.awake, silence_s=peers.silence_s)
        self._copy_threads = copy_threads or DaemonThreads(None, "kv-copy")

    async def close(self) -> None:
        """Closes the transports after copies under way have ended; then the memory may be closed.

        To be called after the last fetch has ended.
        """
        await self._connector.stop()
        await asyncio.to_thread(self._copy_threads.shutdown)
        self._connector.close()

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
            copier = await self._connector.connect(order.source, FetchName(order.lease_id, order.leg))
            copier.pin()
            try:
                with self._peers.use(order.source.address) as source:
                    outcome = await self._run(order, source, copier)
            except BaseException as error:
                copier.stop()
                if isinstance(error, TransferFailed):
                    self._connector.choice.failed(order.source.incarnation)
                raise
            finally:
                copier.unpin()
            self._connector.fetched(order.source, outcome.transport, outcome.num_bytes, outcome.copy_s)
            return outcome
        finally:
            self._imports.drain(order.import_, self._clock.now())  # no effect once READY

    async def _run(self, order: FetchOrder, source: Any, copier: Copier) -> FetchOutcome:
        started_s = self._clock.now()
        async with FetchStream(
            source.Fetch(),
            self._clock,
            self._peers.error_of,
            carried=copier.carried,
            awake=self._peers.awake,
            silence_s=self._peers.silence_s,
        ) as stream:
            await stream.open(self._opening(order, copier))
            progress = _Progress(order.first_block, order.first_block, order.first_block)
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
            other_first_tokens=seal.other_first_tokens,
            num_tokens=seal.num_tokens,
            transport=copier.transport,
            num_blocks=num_blocks,
            num_bytes=num_blocks * self._memory.block_bytes,
            num_not_moved=order.first_block,
            started_s=started_s,
            first_copy_s=progress.first_copy_s,
            copy_s=stream.carrying_s(num_blocks) if copier.carried else progress.copy_s,
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
            checksums=self._checksums,
        )

    async def _pull(self, order: FetchOrder, stream: FetchStream, copier: Copier, progress: _Progress) -> Seal:
        """Copies and acknowledges every announcement in order, and returns the seal. Raises ProtocolViolation.

        Several copies are under way at once if the copier can, and the next one begins before the last is acknowledged.
        """
        end = order.first_block + len(order.targets)
        copies: deque[_Copy] = deque()
        reading = asyncio.create_task(stream.next(), name="kv-fetch-next")
        try:
            while True:
                waits = {reading} if len(copies) < copier.num_copies and not _is_seal(reading) else set()
                if copies:
                    waits.add(copies[0].future)  # type: ignore[arg-type]
                if not waits:
                    break
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if has_landed := bool(copies) and copies[0].future.done():
                    await self._land(copies.popleft(), stream, progress)
                if reading.done() and not _is_seal(reading) and len(copies) < copier.num_copies:
                    copies.append(self._begin(reading.result(), order, copier, progress, end))
                    reading = asyncio.create_task(stream.next(), name="kv-fetch-next")
                if has_landed and self._is_to_acknowledge(stream, copier, progress):
                    progress.acknowledged = progress.copied
                    await stream.ack(progress.copied)
            seal = reading.result()
            assert isinstance(seal, Seal)
        finally:
            unfinished: list[asyncio.Future[Any]] = [reading, *(copy.future for copy in copies)]
            for left in unfinished:
                if not left.cancel() and not left.cancelled():
                    left.exception()  # marks it as retrieved: this fetch ends by another
        if not seal.finished and (progress.copied != end or self._layout.num_blocks(seal.num_tokens) != end):
            raise ProtocolViolation(f"sealed {seal.num_tokens} tokens after {progress.copied} of {end} blocks")
        return seal

    def _begin(self, item: Any, order: FetchOrder, copier: Copier, progress: _Progress, end: int) -> _Copy:
        """Starts the copy of what was announced. Raises ProtocolViolation if that is not what comes next."""
        upto = progress.begun + copier.count(item)
        if item.first_block != progress.begun or not progress.begun < upto <= end:
            raise ProtocolViolation(f"announced {item.first_block}…{upto} after {progress.begun} of {end} blocks")
        targets = order.targets[progress.begun - order.first_block : upto - order.first_block]
        if len(item.checksums) != (len(targets) if self._checksums else 0):
            raise ProtocolViolation("checksums do not match what was asked for")
        begun_s = self._clock.now()
        if progress.first_copy_s is None:
            progress.first_copy_s = begun_s
        progress.busy_since_s = begun_s if progress.begun == progress.copied else progress.busy_since_s
        future = self._copy(order.import_, copier, item, targets)
        progress.begun = upto
        return _Copy(future, upto)

    async def _land(self, copy: _Copy, stream: FetchStream, progress: _Progress) -> None:
        """Notes a copy that has ended. Raises its error, or the one by which the source has ended the fetch."""
        try:
            copy.future.result()
        except TransferFailed:
            await stream.raise_reason()
            raise
        progress.copied = copy.upto
        now = self._clock.now()
        progress.copy_s += now - progress.busy_since_s
        progress.busy_since_s = now

    def _is_to_acknowledge(self, stream: FetchStream, copier: Copier, progress: _Progress) -> bool:
        """Returns whether the source must be told of what is copied.

        Not of the last, if the seal is here already: the Release, which follows at once, says the same. Nor of each
        message that carried its blocks, if the next was here as soon: nothing waits for that, neither a slot nor the
        stall clock.
        """
        more_follows = progress.begun > progress.copied
        if copier.carried and more_follows:
            return (progress.copied - progress.acknowledged) * self._memory.block_bytes >= _ACK_BYTES
        return more_follows or not stream.only_seal_left

    def _copy(
        self, import_: Import, copier: Copier, message: Announced, targets: Sequence[int]
    ) -> asyncio.Future[None]:
        """Starts a copy, and returns a future of its end.

        Cancelling the future does not stop a copy that has begun: the import counts the copy until its thread is done
        with it, or until it was cancelled before a thread took it. Only then can the blocks be freed.
        """
        copy = (copier.threads or self._copy_threads).submit(self._write, copier, message, targets)
        self._imports.copy_started(import_)  # not before, since there may be no thread for it
        copier.pin()
        copy.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._copy_ended, import_, copier))
        return asyncio.wrap_future(copy)

    def _write(self, copier: Copier, message: Announced, targets: Sequence[int]) -> None:
        copier.copy(message, self._memory, targets)
        verify(self._memory, targets, message.checksums)

    def _copy_ended(self, import_: Import, copier: Copier) -> None:
        copier.unpin()
        self._imports.copy_ended(import_, self._clock.now())

    async def _release(self, order: FetchOrder, source: Any) -> None:
        answer = await self._peers.answer(self._released(order, source), "does not answer the release")
        if not answer.valid:
            raise LeaseInvalid(answer.reason)

    async def _released(self, order: FetchOrder, source: Any) -> Any:
        request = kvtransfer_pb2.ReleaseRequest(lease_id=order.lease_id, leg=order.leg)
        try:
            return await source.Release(request, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if not isinstance(as_transfer_error(error, self._peers.error_of), TransferFailed):
                raise
        # The answer may be lost with the connection; the source gives the same leg the same answer again.
        return await source.Release(request, wait_for_ready=True)


@dataclass(frozen=True, slots=True)
class _Copy:
    """Is a copy under way."""

    future: asyncio.Future[None]
    upto: int
    """The index after its last block."""


def _is_seal(reading: asyncio.Task[Announced | Seal]) -> bool:
    """Returns whether the seal was read. Raises the error that came in its place."""
    return reading.done() and isinstance(reading.result(), Seal)


@dataclass(slots=True)
class _Progress:
    begun: int
    """Copies of all blocks before this index have begun, or are over."""
    copied: int
    """The import has all blocks before this index of the sequence."""
    acknowledged: int
    """The source was told of all blocks before this index."""
    first_copy_s: float | None = None
    copy_s: float = 0.0
    busy_since_s: float = 0.0
    """From when on copies are under way that are not in `copy_s` yet."""
