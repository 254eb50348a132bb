"""A handoff between a real source and a real destination: what is copied, when, and who may still have it."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from baton.v1 import types_pb2
from services.core.errors import CorruptBlock, LeaseInvalid, TransferFailed
from services.kvtransfer.client import TransportChoice, lease_may_live
from services.kvtransfer.imports import ImportState
from services.kvtransfer.lease import FetchEnd, LeaseState
from services.kvtransfer.servicer import KVTransferServicer
from tests.contract.kv_harness import LAYOUT, TOKEN, Destination, Gate, Source, running, until

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "grpc"])
WIRE = {"shm": types_pb2.TRANSPORT_SHM, "grpc": types_pb2.TRANSPORT_GRPC}


@TRANSPORTS
@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 320])
async def test_a_sealed_lease_is_copied_and_released(
    transport: TransportChoice, checksums: bool, num_tokens: int
) -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        lease = source.lease(num_tokens, sealed=True)
        order = destination.order(source, lease, transport=transport, checksums=checksums)
        outcome = await destination.fetcher.fetch(order)
        assert outcome.ready
        assert outcome.first_token == TOKEN
        assert outcome.num_tokens == num_tokens
        assert outcome.transport == WIRE[transport]
        assert outcome.num_blocks == lease.num_blocks
        assert outcome.num_bytes == lease.num_blocks * LAYOUT.block_bytes
        assert order.import_.state is ImportState.READY
        assert destination.holds(order.targets) == source.expected(lease)
        assert lease.state is LeaseState.RELEASED
        assert destination.freed == []


@TRANSPORTS
async def test_blocks_are_copied_while_the_prompt_is_computed(transport: TransportChoice) -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        lease = source.lease(40)
        order = destination.order(source, lease, transport=transport)
        fetch = destination.start(order)
        await until(lambda: lease.fetch is not None)
        for num_tokens, copied in ((10, 0), (16, 1), (39, 2)):
            source.publish(lease, num_tokens)
            await until(lambda copied=copied: lease.fetch is not None and lease.fetch.copied == copied)
            assert destination.holds(order.targets)[:copied] == source.expected(lease)[:copied]
            destination.clock.advance(1.0)
        assert not fetch.done()
        source.seal(lease)
        outcome = await fetch
        assert destination.holds(order.targets) == source.expected(lease)
        assert outcome.overlapped_ms == pytest.approx(2000)
        assert outcome.exposed_ms == 0


@TRANSPORTS
async def test_a_partial_block_comes_only_with_the_seal(transport: TransportChoice) -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        lease = source.lease(10)
        fetch = destination.start(destination.order(source, lease, transport=transport))
        await until(lambda: lease.fetch is not None)
        source.publish(lease, 10)
        assert lease.num_published == 0
        source.seal(lease)
        assert (await fetch).num_blocks == 1


@TRANSPORTS
@pytest.mark.parametrize("first_block", [1, 2, 3])
@pytest.mark.parametrize("sealed", [True, False])
async def test_only_the_blocks_that_the_destination_lacks_travel(
    transport: TransportChoice, first_block: int, sealed: bool
) -> None:
    """Also from beyond what is published yet; and when nothing is lacking, token 0 still comes."""
    source, destination = Source(), Destination()
    async with running(source, destination):
        lease = source.lease(40, sealed=sealed)
        order = destination.order(source, lease, transport=transport, first_block=first_block)
        fetch = destination.start(order)
        if not sealed:
            await until(lambda: lease.fetch is not None)
            source.publish(lease, 16)
            source.seal(lease)
        outcome = await fetch
        assert outcome.num_blocks == 3 - first_block
        assert (outcome.first_copy_s is None) == (first_block == 3)
        assert outcome.first_token == TOKEN
        assert destination.holds(order.targets) == source.expected(lease, first_block)


@TRANSPORTS
async def test_many_handoffs_at_once(transport: TransportChoice) -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        leases = [source.lease(33) for _ in range(12)]
        orders = [destination.order(source, lease, transport=transport) for lease in leases]
        fetches = [destination.start(order) for order in orders]
        for lease in leases:
            source.publish(lease, 20)
        for lease in reversed(leases):
            source.seal(lease)
        for lease, order, fetch in zip(leases, orders, fetches, strict=True):
            assert (await fetch).ready
            assert destination.holds(order.targets) == source.expected(lease)


@TRANSPORTS
async def test_when_token_0_ends_the_sequence_the_import_is_dropped(transport: TransportChoice) -> None:
    finish = types_pb2.SequenceFinish(reason=types_pb2.FINISH_REASON_STOP)
    last = types_pb2.SequenceTokens(leg=1, token_ids=[2], finish=finish)
    source, destination = Source(), Destination()
    async with running(source, destination):
        lease = source.lease(40)
        order = destination.order(source, lease, transport=transport)
        fetch = destination.start(order)
        await until(lambda: lease.fetch is not None)
        source.seal(lease, last, finished=True)
        outcome = await fetch
        assert not outcome.ready
        assert outcome.first_token == last
        assert destination.freed == [order.import_]
        late = destination.order(source, lease, leg=2, transport=transport)
        outcome = await destination.start(late)
        assert (outcome.ready, outcome.first_token) == (False, last)


@TRANSPORTS
async def test_a_long_prefill_is_no_fault(transport: TransportChoice) -> None:
    source, destination = Source(), Destination(silence_s=0.5)
    async with running(source, destination):
        lease = source.lease(40)
        fetch = destination.start(destination.order(source, lease, transport=transport))
        await until(lambda: lease.fetch is not None)
        source.pass_time(1000)
        source.publish(lease, 32)
        await until(lambda: lease.fetch is not None and lease.fetch.copied == 2)
        source.pass_time(1000)
        source.seal(lease)
        assert (await fetch).ready


class TestFencing:
    @TRANSPORTS
    async def test_a_higher_leg_ends_the_older_fetch(self, transport: TransportChoice) -> None:
        source, older, newer = Source(), Destination(), Destination()
        async with running(source, older, newer):
            lease = source.lease(40)
            old = older.order(source, lease, leg=3, transport=transport)
            losing = older.start(old)
            source.publish(lease, 16)
            await until(lambda: lease.fetch is not None and lease.fetch.copied == 1)
            winning = newer.start(newer.order(source, lease, leg=4, transport=transport))
            with pytest.raises(LeaseInvalid, match="higher leg"):
                await losing
            assert older.freed == [old.import_]
            source.seal(lease)
            assert (await winning).ready

    async def test_a_lower_leg_is_refused(self) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            lease = source.lease(40)
            fetch = destination.start(destination.order(source, lease, leg=4))
            await until(lambda: lease.fetch is not None)
            with pytest.raises(LeaseInvalid, match="given up"):
                await destination.fetch(source, lease, leg=3)
            source.seal(lease)
            assert (await fetch).ready

    async def test_the_same_leg_replaces_its_own(self) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            lease = source.lease(40)
            first = destination.start(destination.order(source, lease))
            await until(lambda: lease.fetch is not None)
            ticket = lease.fetch
            second = destination.start(destination.order(source, lease))
            with pytest.raises(LeaseInvalid, match="again"):
                await first
            assert ticket is not None
            assert ticket.ended is FetchEnd.REPLACED
            source.seal(lease)
            assert (await second).ready


class TestTheSourceEndsTheLease:
    @TRANSPORTS
    @pytest.mark.parametrize("published", [0, 16])
    async def test_an_abort_ends_the_fetch(self, transport: TransportChoice, published: int) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            lease = source.lease(40)
            order = destination.order(source, lease, transport=transport)
            fetch = destination.start(order)
            source.publish(lease, published)
            await until(lambda: lease.fetch is not None and lease.fetch.copied == published // 16)
            source.table.abort_owned("session", source.clock.now())
            with pytest.raises(LeaseInvalid, match="aborted") as raised:
                await fetch
            assert not lease_may_live(raised.value)
            assert destination.freed == [order.import_]

    async def test_an_abort_under_a_copy_waits_for_the_copy(self) -> None:
        source, destination = Source(), Destination()
        destination.memory.gate = gate = Gate()
        async with running(source, destination):
            lease = source.lease(40)
            order = destination.order(source, lease)
            fetch = destination.start(order)
            source.publish(lease, 16)
            await gate.entered()
            source.table.abort(lease.lease_id, source.clock.now())
            await until(lambda: source.board.num_followers == 0)
            assert order.import_.state is ImportState.COPYING
            assert not destination.freed
            gate.open()
            with pytest.raises(LeaseInvalid, match="aborted"):
                await fetch
            assert destination.freed == [order.import_]

    async def test_an_unknown_or_expired_lease_is_refused(self) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            lease = source.lease(40, sealed=True)
            source.pass_time(10.0)
            assert lease.state is LeaseState.EXPIRED
            with pytest.raises(LeaseInvalid, match="expired"):
                await destination.fetch(source, lease)

    async def test_expiry_between_the_last_copy_and_the_release(self) -> None:
        class Late(KVTransferServicer):
            async def Release(self, request, context):  # type: ignore[no-untyped-def]
                source.pass_time(10.0)
                return await super().Release(request, context)

        source, destination = Source(servicer=Late), Destination()
        async with running(source, destination):
            lease = source.lease(40, sealed=True)
            order = destination.order(source, lease)
            with pytest.raises(LeaseInvalid, match="expired"):
                await destination.fetcher.fetch(order)
            assert lease.state is LeaseState.EXPIRED
            assert destination.freed == [order.import_]


class TestStall:
    @TRANSPORTS
    async def test_the_fetch_ends_and_another_leg_takes_the_lease(self, transport: TransportChoice) -> None:
        source, stuck, other = Source(), Destination(), Destination()
        stuck.memory.gate = gate = Gate()
        async with running(source, stuck, other):
            lease = source.lease(40)
            order = stuck.order(source, lease, leg=1, transport=transport)
            fetch = stuck.start(order)
            source.publish(lease, 16)
            await gate.entered()
            source.pass_time(5.0)
            await until(lambda: source.board.num_followers == 0)
            gate.open()
            with pytest.raises(TransferFailed, match="not copied in time") as raised:
                await fetch
            assert lease_may_live(raised.value)
            assert stuck.freed == [order.import_]
            source.seal(lease)
            assert (await other.fetch(source, lease, leg=2, transport=transport)).ready

    @TRANSPORTS
    @pytest.mark.parametrize("taken_over", [True, False])
    async def test_a_late_release_is_valid_unless_another_leg_was_quicker(
        self, transport: TransportChoice, taken_over: bool
    ) -> None:
        source, stuck, other = Source(), Destination(), Destination()
        stuck.memory.gate = gate = Gate()
        async with running(source, stuck, other):
            lease = source.lease(40, sealed=True)
            fetch = stuck.start(order := stuck.order(source, lease, leg=1, transport=transport))
            await gate.entered()
            await until(lambda: not any(task.get_name() == "kv-fetch-reader" for task in asyncio.all_tasks()))
            source.pass_time(5.0)  # after SEALED was read
            await until(lambda: source.board.num_followers == 0)
            assert lease.state is LeaseState.SEALED
            if taken_over:
                assert (await other.fetch(source, lease, leg=2, transport=transport)).ready
            gate.open()
            if taken_over:
                with pytest.raises(LeaseInvalid):
                    await fetch
                assert stuck.freed == [order.import_]
            else:
                assert (await fetch).ready
                assert stuck.holds(order.targets) == source.expected(lease)


class Holding(KVTransferServicer):
    """Answers a Release only when told."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.asked, self.go, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.answers_first = False

    async def Release(self, request, context):  # type: ignore[no-untyped-def]
        answer = await super().Release(request, context) if self.answers_first else None
        self.asked.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return answer or await super().Release(request, context)


class TestCancellation:
    """In each phase: the import is freed, the lease and the next leg are not harmed."""

    async def finish(self, source: Source, destination: Destination, transport: TransportChoice) -> None:
        (lease,) = source.table
        if lease.state is LeaseState.OPEN:
            source.seal(lease)
        order = destination.order(source, lease, leg=2, transport=transport)
        assert (await destination.fetcher.fetch(order)).ready
        assert destination.holds(order.targets) == source.expected(lease)

    @TRANSPORTS
    async def test_before_the_first_block(self, transport: TransportChoice) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            lease = source.lease(40)
            order = destination.order(source, lease, transport=transport)
            fetch = destination.start(order)
            await until(lambda: lease.fetch is not None)
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            assert destination.freed == [order.import_]
            await until(lambda: source.board.num_followers == 0)
            await self.finish(source, destination, transport)

    @pytest.mark.parametrize("num_steps", range(12))
    @TRANSPORTS
    async def test_at_any_early_step(self, transport: TransportChoice, num_steps: int) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            lease = source.lease(40, sealed=True)
            order = destination.order(source, lease, transport=transport)
            fetch = destination.start(order)
            for _ in range(num_steps):
                await asyncio.sleep(0)
            fetch.cancel()
            await asyncio.wait([fetch])
            destination.table.drain(order.import_, destination.clock.now())  # a task that never ran cannot
            await until(lambda: order.import_.state in (ImportState.FREED, ImportState.READY))
            await until(lambda: source.board.num_followers == 0)
            if len(source.table):
                await self.finish(source, destination, transport)

    @TRANSPORTS
    async def test_under_a_copy_the_blocks_wait_for_it(self, transport: TransportChoice) -> None:
        source, destination = Source(), Destination()
        destination.memory.gate = gate = Gate()
        async with running(source, destination):
            lease = source.lease(40, sealed=True)
            order = destination.order(source, lease, transport=transport)
            fetch = destination.start(order)
            await gate.entered()
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            assert order.import_.state is ImportState.DRAINING
            assert destination.freed == []
            destination.memory.gate = None
            gate.open()
            await until(lambda: order.import_.state is ImportState.FREED)
            await self.finish(source, destination, transport)

    async def test_a_copy_that_no_thread_took_yet_never_writes(self) -> None:
        source, destination = Source(), Destination()
        destination.memory.gate = gate = Gate()
        async with running(source, destination):
            first, second = (destination.order(source, source.lease(40, sealed=True)) for _ in range(2))
            running_copy = destination.start(first)
            await gate.entered()
            queued = destination.start(second)
            await until(lambda: second.import_.num_copies == 1)
            queued.cancel()
            await asyncio.wait([queued])
            await until(lambda: second.import_.state is ImportState.FREED)
            gate.open()
            assert (await running_copy).ready
            assert not any(map(any, destination.holds(second.targets)))
            source.table.abort(second.lease_id, 0.0)

    @TRANSPORTS
    @pytest.mark.parametrize("released", [True, False])
    async def test_during_the_release(self, transport: TransportChoice, released: bool) -> None:
        """The answer may be on its way: then the lease is over, and still nobody uses the blocks."""
        source, destination = Source(servicer=Holding), Destination()
        async with running(source, destination):
            lease = source.lease(40, sealed=True)
            order = destination.order(source, lease, transport=transport)
            fetch = destination.start(order)
            assert isinstance(source.servicer, Holding)
            source.servicer.answers_first = released
            await source.servicer.asked.wait()
            assert order.import_.state is ImportState.VALIDATING
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            assert destination.freed == [order.import_]
            await source.servicer.cancelled.wait()
            source.servicer.go.set()
            assert source.ended == ([lease] if released else [])
            if not released:
                await self.finish(source, destination, transport)

    async def test_an_import_drained_by_its_owner_stops_its_fetch(self) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            lease = source.lease(40)
            order = destination.order(source, lease)
            fetch = destination.start(order)
            await until(lambda: lease.fetch is not None)
            destination.table.drain_owned("session", destination.clock.now())
            fetch.cancel()
            await asyncio.wait([fetch])
            assert destination.freed == [order.import_]
            source.table.abort(lease.lease_id, 0.0)


@TRANSPORTS
async def test_a_corrupted_block_is_data_loss_and_the_lease_lives(transport: TransportChoice) -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        lease = source.lease(40, sealed=True)
        destination.memory.corrupts = True
        order = destination.order(source, lease, transport=transport, checksums=True)
        with pytest.raises(CorruptBlock) as raised:
            await destination.fetcher.fetch(order)
        assert lease_may_live(raised.value)
        assert destination.freed == [order.import_]
        assert lease.state is LeaseState.SEALED
        destination.memory.corrupts = False
        assert (await destination.fetch(source, lease, leg=2, transport=transport, checksums=True)).ready


async def test_a_release_whose_answer_was_lost_is_repeated() -> None:
    class Forgetful(KVTransferServicer):
        num_asked = 0

        async def Release(self, request, context):  # type: ignore[no-untyped-def]
            answer = await super().Release(request, context)
            self.num_asked += 1
            if self.num_asked == 1:
                raise TransferFailed("the answer is lost")
            return answer

    source, destination = Source(servicer=Forgetful), Destination()
    async with running(source, destination):
        lease = source.lease(40, sealed=True)
        assert (await destination.fetch(source, lease)).ready
        assert source.ended == [lease]


def test_on_the_loop_that_production_runs_on() -> None:
    async def main() -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            for transport in ("shm", "grpc"):
                lease = source.lease(40)
                order = destination.order(source, lease, transport=transport)
                fetch = destination.start(order)
                await until(lambda lease=lease: lease.fetch is not None)
                source.publish(lease, 20)
                source.seal(lease)
                assert (await fetch).ready
                assert destination.holds(order.targets) == source.expected(lease)

    uvloop.run(main())
