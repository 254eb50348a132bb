"""Brings prefixes: fills the pool's prefix cache with blocks that it lacks, before a sequence is given to the engine.

Owns: which prefixes are being brought, their bounds, and the references to their blocks until these are cached. Never:
how blocks travel (`services.kvtransfer`), or the sequence: the engine finds in its cache what was brought, and computes
the rest. Whatever goes wrong here, a sequence is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.v1 import types_pb2, worker_pb2
from services.core.clock import AwakeClock, Clock, timeout_after
from services.core.errors import BatonError, CorruptBlock, Overloaded, ProtocolViolation, TransferFailed
from services.core.hashing import BlockHash
from services.engine.schedule.sequence import Sequence
from services.engine.worker_engine import WorkerEngine
from services.kv.handoff_admission import EngineRoom
from services.kv.imports import Import, ImportState, ImportTable
from services.kv.layout import Layout
from services.kv.pool import Holder
from services.kv.prefix_admission import MOST_BRINGS, most_to_bring, why_not_brought
from services.kv.prefix_blocks import PrefixReservation
from services.kvtransfer.borrowing import LOAN_LEG, Borrower, Loan
from services.kvtransfer.client import BlockFetcher, FetchOrder, FetchOutcome
from services.kvtransfer.tiers.stack import Reading
from services.kvtransfer.wire import layout_from_proto
from services.rpc.logging import log_ids
from services.rpc.names import Attr, Span
from services.rpc.plain import enum_word
from services.rpc.telemetry import Attributes, Value
from services.worker.commands import Command
from services.worker.config import PeerConfig
from services.worker.tally import Tally
from services.worker.tiers import WorkerTiers

log = logging.getLogger(__name__)

_LEAST_S, _MOST_S = 0.2, 3.0
"""Bounds of the time for one prefix. Between them it is the time that computing the prefix would take."""
_AVOIDED_S = 10.0
"""How long no prefix is asked of a source that has just failed."""
_MOST_AVOIDED = 256
_MOST_KEEPING = 32
"""Prefixes that a store brings, or has in line to bring. Others are not wanted: it is only for later requests."""
_MOST_OFFERING = 8
_FAULTS = (TransferFailed, ProtocolViolation, CorruptBlock)
"""Errors that count against a source. Another one, such as that it lends no more now, is no fault."""


class PrefixHost(Protocol):
    """Has what is needed of the worker; it is its `WorkerHost`."""

    config: PeerConfig
    engine: WorkerEngine
    imports: ImportTable
    fetcher: BlockFetcher
    borrower: Borrower
    tiers: WorkerTiers | None
    layout: Layout
    tally: Tally
    incarnation: int
    worker_id: str
    clock: Clock
    awake: AwakeClock

    async def hash_prompt(self, sequence: Sequence) -> None: ...

    def source(self) -> types_pb2.KVSource: ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]: ...

    def defect(self, error: Exception) -> None: ...

    def span(self, command: Command, name: str, start_s: float, end_s: float, attributes: Attributes) -> None: ...


class OutOfTime(BatonError):
    """Says that a prefix did not come within the time that computing it takes."""

    reason = "OUT_OF_TIME"


@dataclass(slots=True, eq=False)
class _Bring:
    """Keeps one prefix that is being brought."""

    num_tokens: int
    """Tokens of the sequence that waits for it; 0 if none does."""
    source: types_pb2.KVSource
    command: Command | None
    """That of the sequence; None if the prefix is to be kept here."""
    num_blocks: int = 0
    """Blocks set aside for it, or asked for."""
    asked_s: float | None = None
    """When its source was asked."""
    outcome: FetchOutcome | None = None
    reading: Reading = field(default_factory=Reading)
    """What it has taken of the tiers' time."""


class PrefixLoader:
    """Brings the prefixes of a worker's sequences. Event loop only."""

    def __init__(self, host: PrefixHost) -> None:
        self._host = host
        self._brings: dict[_Bring, None] = {}
        self._turns = asyncio.Semaphore(MOST_BRINGS)
        self._for_others = asyncio.Semaphore(MOST_BRINGS // 2)
        """The turns that prefixes may take for which no sequence here waits."""
        self._underway: dict[BlockHash, asyncio.Event] = {}
        """By the first block that is lacking: the end of the bring that will have it, or has failed."""
        self._num_offering = 0
        self._avoided_until_s: dict[int, float] = {}
        """By the incarnation of a source that has failed, in awake time."""

    @property
    def num_bringing(self) -> int:
        """Returns how many sequences wait for their prefixes."""
        return sum(bring.command is not None for bring in self._brings)

    @property
    def waiting_tokens(self) -> int:
        """Returns how many tokens these have."""
        return sum(bring.num_tokens for bring in self._brings)

    def has_use_for(self, command: Command) -> bool:
        """Returns whether there is anything to be tried before the command's sequence is given to the engine."""
        return command.HasField("prefix_source") or self._host.tiers is not None

    async def bring(self, sequence: Sequence, command: Command) -> worker_pb2.PrefixBrought | None:
        """Brings what this pool lacks of the sequence's prefix, as far as this worker's tiers or the command's source
        have it, there is room, and it takes no longer than to compute it. It raises nothing but CancelledError. Returns
        what has come of asking the source; None if it was not asked."""
        bring = _Bring(len(sequence.token_ids), command.prefix_source, command)
        self._brings[bring] = None
        try:
            with log_ids(command.request_id, command.traceparent):
                await self._host.hash_prompt(sequence)
                await self._bring_in_time(bring, self._host.engine.prefix_hashes(sequence))
        except BatonError as error:
            self._failed(error)
        except Exception as error:
            self._host.defect(error)
            self._failed(error)
        finally:
            del self._brings[bring]
        if bring.asked_s is None:
            return None
        brought = worker_pb2.PrefixBrought(leg=command.leg, ms=(self._host.clock.now() - bring.asked_s) * 1000)
        if bring.outcome is not None:
            brought.num_bytes = bring.outcome.num_bytes
            brought.num_tokens = bring.outcome.num_blocks * self._host.engine.info.block_size
        return brought

    def keep(self, source: types_pb2.KVSource, hashes: Many[BlockHash]) -> int:
        """Begins to bring a prefix that a worker offers to keep here. Returns how many of the blocks are wanted.

        None are if they are here, or too many are being brought already."""
        num_wanted = len(hashes) - self._host.engine.num_cached(hashes)
        if num_wanted and (len(self._brings) >= _MOST_KEEPING or not self._may_ask(source)):
            return 0
        if num_wanted:
            bring = _Bring(0, source, None)
            self._brings[bring] = None  # it counts from now on: many may be offered before its task begins
            keeping = self._host.spawn(self._keep(bring, hashes), "keep a prefix")
            keeping.add_done_callback(lambda _: self._brings.pop(bring))
        return num_wanted

    async def _keep(self, bring: _Bring, hashes: Many[BlockHash]) -> None:
        try:
            await self._bring_in_time(bring, hashes)
        except BatonError as error:
            self._failed(error)

    async def recall(self, hashes: Many[BlockHash]) -> None:
        """Reads blocks back from this worker's tiers that others want to borrow, as far as there is room and it takes
        no longer than they wait. Routers have been told of them as of those in the pool.

        It does not stand in line: two workers that borrow from each other would hold all turns, and wait for one.
        """
        tiers, first_lacking = self._host.tiers, self._first_lacking(hashes)
        if tiers is None or not tiers.has(first_lacking):
            return
        if self._turns.locked() or self._for_others.locked() or len(self._brings) >= _MOST_KEEPING:
            return
        bring = _Bring(0, types_pb2.KVSource(), None)
        self._brings[bring] = None
        try:
            await self._keep(bring, hashes)
        except Exception as error:
            self._host.defect(error)
        finally:
            del self._brings[bring]

    def offer(self, store: types_pb2.KVSource, hashes: Many[BlockHash]) -> None:
        """Offers blocks of this worker's prefix cache to a store, and waits for nothing. Without effect while too many
        offers are under way."""
        if hashes and self._num_offering < _MOST_OFFERING and self._may_ask(store):
            self._num_offering += 1
            self._host.spawn(self._offer(store, hashes), "offer to a store")

    async def _offer(self, store: types_pb2.KVSource, hashes: Many[BlockHash]) -> None:
        try:
            await self._host.borrower.offer(store, self._host.source(), hashes)
        except BatonError as error:
            self._avoid(store)
            log.info("the store at %s was not told of a prefix: %s", store.address, error)
        finally:
            self._num_offering -= 1

    async def _bring_in_time(self, bring: _Bring, hashes: Many[BlockHash]) -> None:
        engine = self._host.engine
        num_lacking = len(hashes) - engine.num_cached(hashes)
        to_compute_s = num_lacking * engine.info.block_size * engine.stats().ms_per_prefill_token / 1000
        limit_s = _MOST_S if bring.command is None else min(_MOST_S, max(_LEAST_S, to_compute_s))
        try:
            async with timeout_after(limit_s, self._host.awake):
                while underway := self._underway.get(self._first_lacking(hashes)):
                    # The bytes travel once, and of two copies the pool would keep one.
                    await underway.wait()
                async with self._for_others if bring.command is None else contextlib.nullcontext(), self._turns:
                    with self._claimed(self._first_lacking(hashes)):
                        await self._from_tiers(bring, hashes)
                        if bring.source.address:
                            await self._from_source(bring, hashes)
        except TimeoutError:
            if bring.asked_s is not None:
                self._avoid(bring.source)
            if self._host.tiers is not None and bring.command is not None:  # else it is no time that computing takes
                self._host.tiers.stack.too_slow(bring.reading, limit_s)
            raise OutOfTime(f"{num_lacking} blocks did not come within {limit_s:g} s") from None

    def _first_lacking(self, hashes: Many[BlockHash]) -> BlockHash:
        """Returns the hash of the first block that is not cached here; of no block if all are."""
        num_cached = self._host.engine.num_cached(hashes)
        return hashes[num_cached] if num_cached < len(hashes) else b""

    @contextlib.contextmanager
    def _claimed(self, first_lacking: BlockHash) -> Iterator[None]:
        """Has others that lack the same block wait until the end of the context."""
        if not first_lacking or first_lacking in self._underway:
            yield
            return
        over = self._underway[first_lacking] = asyncio.Event()
        try:
            yield
        finally:
            del self._underway[first_lacking]
            over.set()

    @contextlib.contextmanager
    def _share(self, bring: _Bring, lacking: Many[BlockHash]) -> Iterator[Many[BlockHash]]:
        """Gives as many of the blocks, from the first on, as may be brought beside what others bring. They count until
        the end of the context, from before anybody is asked for them: several answers may be waited for at once."""
        most = most_to_bring(self._host.engine.info.num_blocks, sum(each.num_blocks for each in self._brings))
        wanted = lacking[:most]
        bring.num_blocks = len(wanted)
        try:
            yield wanted
        finally:
            bring.num_blocks = 0

    # -- from this worker's tiers ------------------------------------------------------------------------------------

    async def _from_tiers(self, bring: _Bring, hashes: Many[BlockHash]) -> None:
        """Reads the blocks that follow those cached here, as far as the tiers have them."""
        host, tiers = self._host, self._host.tiers
        if tiers is None:
            return
        num_cached = host.engine.num_cached(hashes)
        with self._share(bring, hashes[num_cached:]) as wanted:
            num_held = await tiers.num_held(wanted, bring.reading)
            if num_held:
                reservation = self._reserve(hashes[: num_cached + num_held], num_cached)
                bring.num_blocks = len(reservation.fresh)
                await self._read(bring, reservation, hashes, tiers)

    async def _read(
        self, bring: _Bring, reservation: PrefixReservation, hashes: Many[BlockHash], tiers: WorkerTiers
    ) -> None:
        """Reads the fresh blocks, and adds those that were what they should be to the prefix cache."""
        host, num_found = self._host, len(reservation.found)
        import_ = host.imports.reserve(reservation.block_ids, host.clock.now())
        try:
            host.imports.begin(import_, host.clock.now())
            host.imports.copy_started(import_)
            try:
                wanted = hashes[num_found : len(reservation.block_ids)]
                read = await tiers.read(wanted, host.engine.cache, reservation.fresh, bring.reading)
            finally:
                host.imports.copy_ended(import_, host.clock.now())
            host.imports.validate(import_, host.clock.now())
            host.imports.ready(import_, host.clock.now())
        except BaseException:
            host.imports.drain(import_, host.clock.now())
            raise
        num_read = sum(read.values())
        self._cache(reservation, hashes[: num_found + num_read])
        if num_read:
            self._has_read(read, import_, bring.command)

    # -- from other workers and stores ---------------------------------------------------------------------------------

    async def _from_source(self, bring: _Bring, hashes: Many[BlockHash]) -> None:
        """Borrows the blocks that follow those cached here, and copies them."""
        host, source = self._host, bring.source
        num_cached = host.engine.num_cached(hashes)
        with self._share(bring, hashes[num_cached:]) as wanted:
            if not wanted or not self._may_ask(source):
                return
            bring.asked_s = host.clock.now()
            try:
                loan = await host.borrower.borrow(source, wanted)
                if loan is not None:
                    await self._take(bring, hashes[: num_cached + loan.num_blocks], num_cached, loan)
            except _FAULTS:
                self._avoid(source)
                raise

    async def _take(self, bring: _Bring, hashes: Many[BlockHash], num_before: int, loan: Loan) -> None:
        """Copies what was borrowed: the last blocks of `hashes`, behind the first `num_before`. Gives the loan back if
        nothing comes of it."""
        taken = False
        try:
            reservation = self._reserve(hashes, num_before)
            bring.num_blocks = len(reservation.fresh)
            if reservation.fresh:
                bring.outcome = await self._fetch(bring, reservation, hashes, num_before, loan)
                taken = True
            else:  # others have computed or brought them meanwhile
                self._host.engine.release(reservation.found, Holder.IMPORT)
        finally:
            if not taken:
                self._host.borrower.give_back(loan)

    def _reserve(self, hashes: Many[BlockHash], num_before: int) -> PrefixReservation:
        """Sets the blocks aside. Raises Overloaded if there is no room, or the blocks before are not here any more."""

        def check(num_fresh: int, room: EngineRoom) -> None:
            if num_fresh > len(hashes) - num_before:
                raise Overloaded("the blocks before were evicted meanwhile")
            if why := why_not_brought(num_fresh, room):
                raise Overloaded(why)

        return self._host.engine.reserve_prefix(hashes, check)

    async def _fetch(
        self,
        bring: _Bring,
        reservation: PrefixReservation,
        hashes: Many[BlockHash],
        num_before: int,
        loan: Loan,
    ) -> FetchOutcome:
        """Fetches the fresh blocks, and adds them to the prefix cache once the source says that they were its own until
        the last was copied. Then the lease is over."""
        host = self._host
        try:
            import_ = host.imports.reserve(reservation.block_ids, host.clock.now())
        except BaseException:
            host.engine.release(reservation.block_ids, Holder.IMPORT)
            raise
        outcome = await host.fetcher.fetch(
            FetchOrder(
                source=loan.source,
                lease_id=loan.lease_id,
                leg=LOAN_LEG,
                import_=import_,
                first_block=len(reservation.found) - num_before,
                targets=reservation.fresh,
            )
        )
        if not outcome.ready:
            raise ProtocolViolation("what was lent ends as an answer does")
        if outcome.num_tokens != loan.num_blocks * host.engine.info.block_size:
            host.engine.release(reservation.block_ids, Holder.IMPORT)
            raise ProtocolViolation(f"{loan.num_blocks} blocks were lent, and {outcome.num_tokens} tokens sealed")
        self._cache(reservation, hashes)
        self._brought(bring, outcome)
        return outcome

    def _cache(self, reservation: PrefixReservation, hashes: Many[BlockHash]) -> None:
        """Adds what was brought to the prefix cache. Others may be evicted next: where nothing is computed, nothing
        else says so to the tiers."""
        self._host.engine.keep_prefix(reservation, hashes)
        if self._host.tiers is not None:
            self._host.tiers.demoter.stepped()

    # -- what is known of sources --------------------------------------------------------------------------------------

    def _may_ask(self, source: types_pb2.KVSource) -> bool:
        if source.incarnation == self._host.incarnation:
            return False
        if self._host.layout.mismatch(layout_from_proto(source.layout)) is not None:
            return False
        return self._host.awake.now() >= self._avoided_until_s.get(source.incarnation, 0.0)

    def _avoid(self, source: types_pb2.KVSource) -> None:
        self._avoided_until_s.pop(source.incarnation, None)
        self._avoided_until_s[source.incarnation] = self._host.awake.now() + _AVOIDED_S
        if len(self._avoided_until_s) > _MOST_AVOIDED:
            del self._avoided_until_s[next(iter(self._avoided_until_s))]

    # -- what shows ----------------------------------------------------------------------------------------------------

    def _brought(self, bring: _Bring, outcome: FetchOutcome) -> None:
        transport = enum_word(types_pb2.Transport.DESCRIPTOR, outcome.transport)
        times_s = (outcome.started_s, outcome.ended_s)
        self._note({"peer": outcome.num_blocks}, bring.source.address, bring.command, times_s, transport)

    def _has_read(self, num_read: dict[str, int], import_: Import, command: Command | None) -> None:
        times_s = (import_.entered_s[ImportState.RESERVED], import_.entered_s[ImportState.READY])
        self._note(num_read, "+".join(num_read), command, times_s)

    def _note(
        self,
        num_brought: dict[str, int],
        source: str,
        command: Command | None,
        times_s: tuple[float, float],
        transport: str | None = None,
    ) -> None:
        """Counts and records blocks that were brought, by the kind of place where they were."""
        host, num_blocks = self._host, sum(num_brought.values())
        for kind, count in num_brought.items():
            host.tally.prefix_tokens_brought[kind] += count * host.engine.info.block_size
        log.info("brought %d blocks from %s", num_blocks, source)
        if command is None:
            return
        attributes: dict[str, Value | None] = {
            Attr.LEG: command.leg,
            Attr.WORKER: host.worker_id,
            Attr.SOURCE: source,
            Attr.TRANSFER_TRANSPORT: transport,
            Attr.TRANSFER_BYTES: num_blocks * host.engine.cache.block_bytes,
            Attr.TRANSFER_BLOCKS: num_blocks,
        }
        host.span(command, Span.KV_FETCH, *times_s, attributes)

    def _failed(self, error: Exception) -> None:
        reason = error.reason if isinstance(error, BatonError) else BatonError.reason
        self._host.tally.prefixes_failed[reason.lower()] += 1
        log.info("a prefix was not brought: %s", error)
