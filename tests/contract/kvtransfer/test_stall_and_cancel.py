"""Handoffs that stall or are cancelled, phase by phase: what is freed, and who may still have the lease."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest

from baton.v1 import types_pb2
from services.core.daemon_threads import DaemonThreads
from services.core.errors import CorruptBlock, LeaseInvalid, TransferFailed
from services.kv.imports import ImportState
from services.kv.lease import FetchEnd, Lease, LeaseState
from services.kvtransfer.client import lease_may_live
from services.kvtransfer.servicer import KVTransferServicer
from services.kvtransfer.transports.tcp import ANSWER, GRANTED, REQUEST
from tests.support.kv_harness import LAYOUT, NIXL, Destination, Source, opening, raw_stub, running, until
from tests.support.kv_memory import Gate
from tests.support.tcp_peer import connected

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp", NIXL, "grpc"])


def is_sending(lease: Lease) -> bool:
    """Returns whether a thread of the source is still about to end its sending: what has come is no proof of that."""
    return lease.fetch is not None and bool(lease.fetch.sending)


class TestStall:
    @TRANSPORTS
    async def test_the_fetch_ends_and_another_leg_takes_the_lease(self, transport: str) -> None:
        source, stuck, other = Source(), Destination(), Destination()
        stuck.memory.gate = gate = Gate()
        async with running(source, stuck, other):
            lease = source.lease(40)
            order = stuck.order(source, lease, leg=1, transport=transport)
            fetch = stuck.start(order)
            source.publish(lease, 16)
            await gate.entered()
            await until(lambda: not is_sending(lease))
            source.pass_time(5.0)
            await until(lambda: source.board.num_followers == 0)
            gate.open()
            # The second is what grpc.aio says, in place of the source's word, if an acknowledgement meets that word.
            with pytest.raises(TransferFailed, match=r"not copied in time|Internal error from Core") as raised:
                await fetch
            assert lease_may_live(raised.value)
            await until(lambda: stuck.freed == [order.import_])
            source.seal(lease)
            assert (await other.fetch(source, lease, leg=2, transport=transport)).ready

    @TRANSPORTS
    @pytest.mark.parametrize("taken_over", [True, False])
    async def test_a_late_release_is_valid_unless_another_leg_was_quicker(
        self, transport: str, taken_over: bool
    ) -> None:
        source, stuck, other = Source(), Destination(), Destination()
        stuck.memory.gate = gate = Gate()
        async with running(source, stuck, other):
            lease = source.lease(40, sealed=True)
            fetch = stuck.start(order := stuck.order(source, lease, leg=1, transport=transport))
            await gate.entered()
            await until(lambda: not any(task.get_name() == "kv-fetch-reader" for task in asyncio.all_tasks()))
            await until(lambda: not is_sending(lease))
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


class TestSlowNetwork:
    @pytest.mark.usefixtures("plain_or_tls")
    async def test_a_block_that_is_on_its_way_is_no_stall(self) -> None:
        """However long it takes: the connection has a bound of its own for one who does not read."""
        source = Source(layout=dataclasses.replace(LAYOUT, head_dim=8 << 14))
        async with running(source), raw_stub(source) as stub, connected(source) as peer:
            await peer.introduce()
            lease = source.lease(16, sealed=True)
            call = stub.Fetch()
            await call.write(opening(source, lease.lease_id, transport=types_pb2.TRANSPORT_TCP))
            await until(lambda: lease.fetch is not None and lease.fetch.announced == 1)
            peer.socket.sendall(REQUEST.pack(lease.lease_id, 1, 0, 1))
            assert ANSWER.unpack(await peer.read(ANSWER.size)) == (source.layout.block_bytes, GRANTED)
            for _ in range(3):
                source.pass_time(5.0)
                assert lease.fetch is not None, "more is left than the kernels keep, so it is still being sent"
            assert await peer.read(source.layout.block_bytes) == source.expected(lease)[0]
            ticket = lease.fetch
            await until(lambda: not ticket.sending)
            source.pass_time(5.0)
            assert ticket.ended is FetchEnd.STALLED, "it is not acknowledged"
            call.cancel()
            source.table.abort(lease.lease_id, source.clock.now())


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
    """Tests that a cancel in any phase frees the import, and harms neither the lease nor the next leg."""

    async def finish(self, source: Source, destination: Destination, transport: str) -> None:
        (lease,) = source.table
        if lease.state is LeaseState.OPEN:
            source.seal(lease)
        order = destination.order(source, lease, leg=2, transport=transport)
        assert (await destination.fetcher.fetch(order)).ready
        assert destination.holds(order.targets) == source.expected(lease)

    @TRANSPORTS
    async def test_before_the_first_block(self, transport: str) -> None:
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
    async def test_at_any_early_step(self, transport: str, num_steps: int) -> None:
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
    async def test_under_a_copy_the_blocks_wait_for_it(self, transport: str) -> None:
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
        source, destination = Source(), Destination(copy_threads=DaemonThreads(1, "kv-copy"))
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

    @pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
    async def test_a_copy_for_which_there_is_no_thread_frees_its_blocks(
        self, transport: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in a container that may have no more of them. The next fetch is served when there is one."""
        source, destination, start = Source(), Destination(), threading.Thread.start

        def start_some(self: threading.Thread) -> None:
            if self.name.startswith(("kv-copy_", "kv-tcp_")):
                raise RuntimeError("can't start new thread")
            start(self)

        async with running(source, destination):
            lease = source.lease(40, sealed=True)
            order = destination.order(source, lease, transport=transport)
            with monkeypatch.context() as no_threads:
                no_threads.setattr(threading.Thread, "start", start_some)
                with pytest.raises(RuntimeError, match="new thread"):
                    await destination.fetcher.fetch(order)
            assert order.import_.state is ImportState.FREED
            assert (await destination.fetch(source, lease, leg=2, transport=transport)).ready

    @TRANSPORTS
    @pytest.mark.parametrize("released", [True, False])
    async def test_during_the_release(self, transport: str, released: bool) -> None:
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

    async def test_an_import_that_is_drained_stops_its_fetch(self) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            lease = source.lease(40)
            order = destination.order(source, lease)
            fetch = destination.start(order)
            await until(lambda: lease.fetch is not None)
            destination.table.drain(order.import_, destination.clock.now())
            fetch.cancel()
            await asyncio.wait([fetch])
            assert destination.freed == [order.import_]
            source.table.abort(lease.lease_id, 0.0)


@TRANSPORTS
@pytest.mark.parametrize("num_tokens", [16, 40])
async def test_a_corrupted_block_is_data_loss_and_the_lease_lives(transport: str, num_tokens: int) -> None:
    source, destination = Source(), Destination(checksums=True)
    async with running(source, destination):
        lease = source.lease(num_tokens, sealed=True)
        destination.memory.corrupts = True
        order = destination.order(source, lease, transport=transport)
        with pytest.raises(CorruptBlock) as raised:
            await destination.fetcher.fetch(order)
        assert lease_may_live(raised.value)
        assert destination.freed == [order.import_]
        assert lease.state is LeaseState.SEALED
        destination.memory.corrupts = False
        assert (await destination.fetch(source, lease, leg=2, transport=transport)).ready


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
