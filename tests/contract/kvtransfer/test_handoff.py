"""Tests a handoff between a real source and a real destination: what is copied, when, and who may still have it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from baton.v1 import types_pb2
from services.core.errors import LeaseInvalid, TransferFailed
from services.kv.imports import ImportState
from services.kv.lease import FetchEnd, LeaseState
from services.kv.regions import Buffer
from services.kvtransfer import client
from services.kvtransfer.client import lease_may_live
from services.kvtransfer.fetch_stream import FetchStream, Seal
from services.kvtransfer.servicer import KVTransferServicer
from services.kvtransfer.transports import grpc as grpc_transport
from services.kvtransfer.transports import shm
from services.kvtransfer.wire import Announced
from tests.support.kv_harness import LAYOUT, NIXL, TOKEN, Destination, Source, running, until
from tests.support.kv_memory import Gate
from tests.support.patience import HANG_S

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp", NIXL, "grpc"])
WIRE = {name: types_pb2.Transport.Value(f"TRANSPORT_{name.upper()}") for name in ("shm", "tcp", "nixl", "grpc")}


def seen_streams(monkeypatch: pytest.MonkeyPatch) -> list[FetchStream]:
    """Returns the streams of the fetches that begin from now on."""
    streams: list[FetchStream] = []

    class Seen(client.FetchStream):
        def __init__(self, *args: Any, **fields: Any) -> None:
            super().__init__(*args, **fields)
            streams.append(self)

    monkeypatch.setattr(client, "FetchStream", Seen)
    return streams


def acknowledgements(source: Source, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns what the source is told from now on to be copied."""
    acknowledged: list[int] = []
    ack = source.table.ack
    monkeypatch.setattr(
        source.table, "ack", lambda ticket, upto, now: (acknowledged.append(upto), ack(ticket, upto, now))
    )
    return acknowledged


@TRANSPORTS
@pytest.mark.parametrize(("num_tokens", "checksums"), [(1, False), (16, True), (17, False), (320, True)])
async def test_a_sealed_lease_is_copied_and_released(transport: str, checksums: bool, num_tokens: int) -> None:
    source, destination = Source(), Destination(checksums=checksums)
    async with running(source, destination):
        lease = source.lease(num_tokens, sealed=True)
        order = destination.order(source, lease, transport=transport)
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
async def test_blocks_are_copied_while_the_prompt_is_computed(transport: str) -> None:
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
        assert outcome.first_copy_s is not None
        assert outcome.sealed_s - outcome.first_copy_s == pytest.approx(2)
        assert outcome.ended_s == outcome.sealed_s


@TRANSPORTS
async def test_copies_of_a_fetch_do_not_wait_for_those_of_another(transport: str) -> None:
    source, destination = Source(), Destination()
    destination.memory.gate = gate = Gate()
    async with running(source, destination):
        held_up = destination.start(destination.order(source, source.lease(40, sealed=True), transport=transport))
        await gate.entered()
        destination.memory.gate = None
        try:
            lease = source.lease(40, sealed=True)
            order = destination.order(source, lease, transport=transport)
            async with asyncio.timeout(HANG_S):
                assert (await destination.fetcher.fetch(order)).ready
            assert destination.holds(order.targets) == source.expected(lease)
            assert not held_up.done()
        finally:
            gate.open()
        assert (await held_up).ready


@TRANSPORTS
async def test_the_last_blocks_are_not_acknowledged_once_the_seal_is_here(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Release follows the last copy at once, and an acknowledgement would only hold it up."""
    source, destination = Source(), Destination()
    streams, acknowledged = seen_streams(monkeypatch), acknowledgements(source, monkeypatch)
    async with running(source, destination):
        lease = source.lease(40)
        order = destination.order(source, lease, transport=transport)
        fetch = destination.start(order)
        source.publish(lease, 16)
        await until(lambda: acknowledged == [1])
        destination.memory.gate = gate = Gate()
        source.seal(lease)
        await gate.entered()
        await until(lambda: streams[0].only_seal_left)
        gate.open()
        assert (await fetch).ready
        assert acknowledged == [1]
        assert destination.holds(order.targets) == source.expected(lease)


@pytest.mark.parametrize(("ack_bytes", "expected"), [(1 << 20, []), (1, [1])])
async def test_messages_that_carry_blocks_and_follow_each_other_are_acknowledged_together(
    ack_bytes: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = Source(), Destination()
    monkeypatch.setattr(grpc_transport, "_MESSAGE_BYTES", LAYOUT.block_bytes)
    monkeypatch.setattr(client, "_ACK_BYTES", ack_bytes)
    streams, acknowledged = seen_streams(monkeypatch), acknowledgements(source, monkeypatch)
    async with running(source, destination):
        destination.memory.gate = gate = Gate()
        lease = source.lease(32, sealed=True)
        order = destination.order(source, lease, transport="grpc")
        fetch = destination.start(order)
        await gate.entered()
        await until(lambda: streams[0].only_seal_left)
        gate.open()
        assert (await fetch).ready
        assert acknowledged == expected
        assert destination.holds(order.targets) == source.expected(lease)


async def test_the_next_copy_begins_before_the_last_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """An acknowledgement takes a turn of the event loop and of gRPC, in which nothing would be copied."""
    source, destination = Source(), Destination()
    monkeypatch.setattr(shm, "MESSAGE_BYTES", LAYOUT.block_bytes)
    under_way: list[int] = []

    class Seen(FetchStream):
        async def ack(self, copied: int) -> None:
            under_way.append(order.import_.num_copies)
            await super().ack(copied)

    monkeypatch.setattr(client, "FetchStream", Seen)
    streams = seen_streams(monkeypatch)
    async with running(source, destination):
        destination.memory.gate = gate = Gate()
        order = destination.order(source, source.lease(32, sealed=True), transport="shm")
        fetch = destination.start(order)
        await gate.entered()
        await until(lambda: streams[0].only_seal_left)
        gate.open()
        assert (await fetch).ready
        assert under_way == [1]


async def test_copies_that_end_in_another_order_are_acknowledged_in_the_blocks_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, destination = Source(), Destination()
    monkeypatch.setattr(grpc_transport, "_MESSAGE_BYTES", LAYOUT.block_bytes)
    monkeypatch.setattr(grpc_transport.GrpcCopier, "num_copies", 2)
    monkeypatch.setattr(client, "_ACK_BYTES", 1)
    acknowledged, write, second = acknowledgements(source, monkeypatch), destination.memory.write_blocks, Gate()

    def write_late(block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        if block_ids[0] == order.targets[0]:
            second.enter()
        write(block_ids, data)
        if block_ids[0] == order.targets[1]:
            second.open()

    monkeypatch.setattr(destination.memory, "write_blocks", write_late)
    async with running(source, destination):
        lease = source.lease(40)
        order = destination.order(source, lease, transport="grpc")
        fetch = destination.start(order)
        source.publish(lease, 32)
        await until(lambda: 2 in acknowledged)
        source.seal(lease)
        assert (await fetch).ready
        assert acknowledged == sorted(acknowledged)
        assert destination.holds(order.targets) == source.expected(lease)


async def test_messages_that_carry_blocks_are_timed_where_one_follows_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Writing what they carry to the pool takes no time to speak of, and between others the prompt is computed."""
    source, destination = Source(), Destination()

    class Slow(FetchStream):
        async def _receive(self) -> Announced | Seal:
            item = await super()._receive()
            destination.clock.advance(1.0)
            return item

    monkeypatch.setattr(client, "FetchStream", Slow)
    monkeypatch.setattr(grpc_transport, "_MESSAGE_BYTES", LAYOUT.block_bytes)
    async with running(source, destination):
        lease = source.lease(80)
        fetch = destination.start(destination.order(source, lease, transport="grpc"))
        await until(lambda: lease.fetch is not None)
        source.publish(lease, 32)
        await until(lambda: lease.most_copied == 2)
        destination.clock.advance(100.0)
        source.seal(lease)
        outcome = await fetch
        assert outcome.num_blocks == 5
        assert outcome.copy_s == pytest.approx(5.0)
        lone = await destination.fetch(source, source.lease(16, sealed=True), transport="grpc")
        assert lone.copy_s == 0.0, "not known"


@TRANSPORTS
async def test_a_partial_block_comes_only_with_the_seal(transport: str) -> None:
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
    transport: str, first_block: int, sealed: bool
) -> None:
    """A destination may lack none but blocks that are not published yet, or none at all; token 0 still comes."""
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
async def test_many_handoffs_at_once(transport: str) -> None:
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
async def test_when_token_0_ends_the_sequence_the_import_is_dropped(transport: str) -> None:
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
async def test_a_long_prefill_is_no_fault(transport: str) -> None:
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
    async def test_a_higher_leg_ends_the_older_fetch(self, transport: str) -> None:
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
    async def test_an_abort_ends_the_fetch(self, transport: str, published: int) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            lease = source.lease(40)
            order = destination.order(source, lease, transport=transport)
            fetch = destination.start(order)
            source.publish(lease, published)
            await until(lambda: lease.fetch is not None and lease.fetch.copied == published // 16)
            source.table.abort(lease.lease_id, source.clock.now())
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
            assert order.import_.state in (ImportState.COPYING, ImportState.DRAINING)
            assert not destination.freed
            gate.open()
            # The acknowledgement of the copy may meet the end of the stream, and gRPC then reports that.
            with pytest.raises((LeaseInvalid, TransferFailed)):
                await fetch
            await until(lambda: destination.freed == [order.import_])

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
                # The Release does not wait for the fetch's end, and while that goes on a lease does not expire: a fetch
                # that is still open ends as stalled first.
                source.pass_time(10.0)
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
