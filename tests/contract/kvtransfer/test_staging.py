"""Tests handing over by shared memory from a pool that cannot be mapped: what is in the slots, whose they are, when
they are free."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from baton.v1 import types_pb2
from services.core.errors import CorruptBlock, LeaseInvalid, TransferFailed
from services.kv.lease import FetchEnd, Lease, LeaseState
from services.kv.regions import check_regions
from services.kvtransfer.transports.staging import StagingArea, num_slots_for
from tests.support.kv_harness import LAYOUT, TOKEN, Destination, Source, opening, raw_stub, running, until
from tests.support.kv_memory import DeviceMemory, Gate


def free_slots(source: Source) -> int:
    assert source.staging is not None
    source.staging.slots.check()
    return source.staging.slots.num_free


def gate_reads(source: Source) -> Gate:
    assert isinstance(source.memory, DeviceMemory)
    source.memory.read_gate = gate = Gate()
    return gate


async def seal_was_read() -> None:
    """Waits until every destination here has read the seal."""
    await until(lambda: not any(task.get_name() == "kv-fetch-reader" for task in asyncio.all_tasks()))


@pytest.mark.parametrize("num_slots", [1, 4, 64])
@pytest.mark.parametrize(("num_tokens", "checksums"), [(1, True), (17, False), (320, True)])
async def test_a_sealed_lease_is_copied_and_released(num_slots: int, checksums: bool, num_tokens: int) -> None:
    """A lease may have more blocks than there are slots."""
    source, destination = Source(num_slots=num_slots), Destination(checksums=checksums)
    async with running(source, destination):
        lease = source.lease(num_tokens, sealed=True)
        order = destination.order(source, lease, transport="shm")
        outcome = await destination.fetcher.fetch(order)
        assert outcome.ready
        assert outcome.first_token == TOKEN
        assert outcome.transport == types_pb2.TRANSPORT_SHM
        assert outcome.num_blocks == lease.num_blocks
        assert destination.holds(order.targets) == source.expected(lease)
        assert lease.state is LeaseState.RELEASED
        assert free_slots(source) == num_slots


async def test_blocks_are_copied_while_the_prompt_is_computed() -> None:
    source, destination = Source(num_slots=2), Destination()
    async with running(source, destination):
        lease = source.lease(100)
        order = destination.order(source, lease, transport="shm", first_block=1)
        fetch = destination.start(order)
        await until(lambda: lease.fetch is not None)
        for num_tokens, copied in ((10, 1), (40, 2), (96, 6)):
            source.publish(lease, num_tokens)
            await until(lambda copied=copied: lease.fetch is not None and lease.fetch.copied == copied)
            assert destination.holds(order.targets)[: copied - 1] == source.expected(lease, 1)[: copied - 1]
            assert free_slots(source) == 2
        source.seal(lease)
        assert (await fetch).ready
        assert destination.holds(order.targets) == source.expected(lease, 1)


@pytest.mark.parametrize("num_slots", [1, 3])
async def test_many_handoffs_share_few_slots(num_slots: int) -> None:
    source, destinations = Source(num_slots=num_slots), [Destination() for _ in range(3)]
    async with running(source, *destinations):
        leases = [source.lease(65) for _ in range(9)]
        orders = [destinations[at % 3].order(source, lease, transport="shm") for at, lease in enumerate(leases)]
        fetches = [destinations[at % 3].start(order) for at, order in enumerate(orders)]
        for lease in leases:
            source.publish(lease, 40)
        for lease in reversed(leases):
            source.seal(lease)
        for at, (lease, order, fetch) in enumerate(zip(leases, orders, fetches, strict=True)):
            assert (await fetch).ready
            assert destinations[at % 3].holds(order.targets) == source.expected(lease)


async def test_by_grpc_no_slot_is_needed() -> None:
    source, stuck, destination = Source(num_slots=1), Destination(), Destination()
    stuck.memory.gate = gate = Gate()
    async with running(source, stuck, destination):
        held, lease = source.lease(16, sealed=True), source.lease(40, sealed=True)
        fetch = stuck.start(stuck.order(source, held, transport="shm"))
        await gate.entered()
        assert free_slots(source) == 0
        assert (await destination.fetch(source, lease, transport="grpc")).ready
        gate.open()
        assert (await fetch).ready


async def test_who_waits_for_a_slot_is_under_no_clock_and_then_served() -> None:
    source, slow, waiting = Source(num_slots=2), Destination(), Destination()
    slow.memory.gate = gate = Gate()
    async with running(source, slow, waiting):
        first, second = source.lease(32, sealed=True), source.lease(40, sealed=True)
        slow_fetch = slow.start(slow.order(source, first, transport="shm"))
        await gate.entered()
        await until(lambda: free_slots(source) == 0)
        order = waiting.order(source, second, transport="shm")
        fetch = waiting.start(order)
        await until(lambda: source.num_kept_slots == 3)
        assert second.deadline_s is None
        source.pass_time(4.9)
        assert second.live
        assert second.fetch is not None
        gate.open()
        assert (await fetch).ready
        assert (await slow_fetch).ready
        assert waiting.holds(order.targets) == source.expected(second)


async def test_a_destination_that_stops_keeps_its_slots_until_the_lease_is_over() -> None:
    source, stuck = Source(num_slots=4), Destination()
    stuck.memory.gate = gate = Gate()
    async with running(source, stuck):
        lease = source.lease(64, sealed=True)
        fetch = stuck.start(stuck.order(source, lease, transport="shm"))
        await gate.entered()
        await seal_was_read()
        source.pass_time(5.0)
        await until(lambda: source.board.num_followers == 0)
        assert lease.fetch is None
        assert free_slots(source) == 0
        source.pass_time(10.0)
        assert lease.state is LeaseState.EXPIRED
        assert free_slots(source) == 4
        gate.open()
        with pytest.raises(LeaseInvalid, match="expired"):
            await fetch


class TestAfterTheStream:
    """Its destination has read the seal, and copies on."""

    @contextlib.asynccontextmanager
    async def stalled(self, source: Source, stuck: Destination, lease: Lease):  # type: ignore[no-untyped-def]
        stuck.memory.gate = gate = Gate()
        order = stuck.order(source, lease, leg=1, transport="shm")
        fetch = stuck.start(order)
        await gate.entered()
        await seal_was_read()
        source.pass_time(5.0)
        await until(lambda: source.board.num_followers == 0)
        yield order, fetch
        gate.open()
        await asyncio.wait([fetch])

    async def test_its_release_is_valid_and_its_blocks_are_right(self) -> None:
        """Although others were served meanwhile, from other slots."""
        source, stuck, other = Source(num_slots=5), Destination(), Destination()
        async with running(source, stuck, other):
            lease, following = source.lease(48, sealed=True), source.lease(320, sealed=True)
            async with self.stalled(source, stuck, lease) as (order, fetch):
                assert free_slots(source) == 2
                assert (await other.fetch(source, following, transport="shm")).ready
            assert (await fetch).ready
            assert stuck.holds(order.targets) == source.expected(lease)

    async def test_when_there_are_no_others_it_is_refused(self) -> None:
        source, stuck, other = Source(num_slots=3), Destination(), Destination()
        async with running(source, stuck, other):
            lease, following = source.lease(48, sealed=True), source.lease(320, sealed=True)
            order = other.order(source, following, transport="shm")
            async with self.stalled(source, stuck, lease) as (_, fetch):
                assert (await other.fetcher.fetch(order)).ready
                assert lease.fenced
                assert lease.state is LeaseState.SEALED
            assert other.holds(order.targets) == source.expected(following)
            with pytest.raises(LeaseInvalid, match="given up"):
                await fetch
            again = other.order(source, lease, leg=2, transport="shm")
            assert (await other.fetcher.fetch(again)).ready
            assert other.holds(again.targets) == source.expected(lease)

    async def test_who_waited_before_it_stalled_hears_of_it(self) -> None:
        source, stuck, other = Source(num_slots=3), Destination(), Destination()
        stuck.memory.gate = gate = Gate()
        async with running(source, stuck, other):
            lease, following = source.lease(48, sealed=True), source.lease(320, sealed=True)
            fetch = stuck.start(stuck.order(source, lease, transport="shm"))
            await gate.entered()
            await seal_was_read()
            waiting = other.start(order := other.order(source, following, transport="shm"))
            await until(lambda: source.num_kept_slots == 4)
            source.pass_time(5.0)
            assert (await waiting).ready
            assert other.holds(order.targets) == source.expected(following)
            gate.open()
            with pytest.raises(LeaseInvalid, match="given up"):
                await fetch
            source.table.abort(lease.lease_id, 0.0)

    async def test_a_higher_leg_gets_the_slots(self) -> None:
        source, stuck, other = Source(num_slots=3), Destination(), Destination()
        async with running(source, stuck, other):
            lease = source.lease(48, sealed=True)
            async with self.stalled(source, stuck, lease) as (_, fetch):
                order = other.order(source, lease, leg=2, transport="shm")
                assert (await other.fetcher.fetch(order)).ready
            assert other.holds(order.targets) == source.expected(lease)
            with pytest.raises(LeaseInvalid):
                await fetch


class TestUnderOurOwnCopy:
    """Tests that a slot that our own thread writes to is nobody else's."""

    async def test_a_higher_leg_waits_for_it(self) -> None:
        source, older, newer = Source(num_slots=1), Destination(), Destination()
        async with running(source, older, newer):
            lease = source.lease(40, sealed=True)
            gate = gate_reads(source)
            first = older.start(older.order(source, lease, leg=1, transport="shm"))
            await gate.entered()
            ticket = lease.fetch
            order = newer.order(source, lease, leg=2, transport="shm")
            second = newer.start(order)
            await until(lambda: source.num_kept_slots == 2)
            assert ticket is not None
            assert ticket.ended is FetchEnd.FENCED
            assert free_slots(source) == 0
            gate.open()
            assert (await second).ready
            with pytest.raises(LeaseInvalid):
                await first
            assert newer.holds(order.targets) == source.expected(lease)

    async def test_an_abort_waits_for_it(self) -> None:
        source, destination = Source(num_slots=1), Destination()
        async with running(source, destination):
            lease = source.lease(40, sealed=True)
            gate = gate_reads(source)
            fetch = destination.start(destination.order(source, lease, transport="shm"))
            await gate.entered()
            source.table.abort(lease.lease_id, 0.0)
            assert free_slots(source) == 0
            gate.open()
            with pytest.raises(LeaseInvalid, match="aborted"):
                await fetch
            await until(lambda: free_slots(source) == 1)

    async def test_a_copy_that_no_thread_took_yet_gives_its_slots_back(self) -> None:
        source, first, second = Source(num_slots=8), Destination(), Destination()
        async with running(source, first, second):
            leases = [source.lease(16, sealed=True) for _ in range(2)]
            gate = gate_reads(source)
            running_copy = first.start(first.order(source, leases[0], transport="shm"))
            await gate.entered()
            queued = second.start(second.order(source, leases[1], transport="shm"))
            await until(lambda: free_slots(source) == 6)
            queued.cancel()
            await asyncio.wait([queued])
            source.table.abort(leases[1].lease_id, 0.0)
            await until(lambda: free_slots(source) == 7)
            gate.open()
            assert (await running_copy).ready

    async def test_a_read_that_fails_ends_the_fetch_and_gives_its_slots_back(self) -> None:
        class Broken(DeviceMemory):
            def copy_blocks(self, block_ids: Sequence[int], targets: Sequence[memoryview]) -> None:
                raise OSError("the device is gone")

        source, destination = Source(num_slots=2), Destination()
        async with running(source, destination):
            lease = source.lease(40, sealed=True)
            assert source.staging is not None
            source.staging._memory = Broken(1, LAYOUT.block_bytes)
            with pytest.raises(TransferFailed):
                await destination.fetch(source, lease, transport="shm")
            source.table.abort(lease.lease_id, 0.0)
            await until(lambda: free_slots(source) == 2)


async def test_a_slot_that_is_corrupted_on_the_way_is_data_loss() -> None:
    source, destination = Source(num_slots=4), Destination(checksums=True)
    async with running(source, destination):
        lease = source.lease(40, sealed=True)
        destination.memory.corrupts = True
        with pytest.raises(CorruptBlock):
            await destination.fetch(source, lease, transport="shm")
        destination.memory.corrupts = False
        order = destination.order(source, lease, leg=2, transport="shm")
        assert (await destination.fetcher.fetch(order)).ready
        assert destination.holds(order.targets) == source.expected(lease)


async def test_what_was_read_for_a_fetch_that_has_ended_meanwhile_is_not_sent() -> None:
    """The pool's blocks may have been another sequence's by then."""
    source = Source(num_slots=4)
    gate = gate_reads(source)
    async with running(source), raw_stub(source) as stub:
        lease = source.lease(40, sealed=True)
        call = stub.Fetch()
        await call.write(opening(source, lease.lease_id, transport=types_pb2.TRANSPORT_SHM))
        await gate.entered()
        source.table.abort(lease.lease_id, source.clock.now())
        gate.open()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert ended.value.code() is grpc.StatusCode.ABORTED


def test_a_slot_s_region_is_its_memory() -> None:
    area = StagingArea(3, LAYOUT.block_bytes)
    assert (area.whole.length, area.whole.device) == (3 * LAYOUT.block_bytes, "cpu")
    for slot in range(3):
        area.write_blocks([slot], [os.urandom(LAYOUT.block_bytes)])
        region = area.region(slot)
        assert ctypes.string_at(region.address, region.length) == bytes(area.read_blocks([slot])[0])
    check_regions(area, LAYOUT.block_bytes)
    area.close()


def test_the_number_of_slots_is_bounded_by_bytes_and_by_the_pool_but_some_there_are() -> None:
    pool = DeviceMemory(64, 4096)
    assert num_slots_for(pool, 40 * 4096 + 1) == 40
    assert num_slots_for(pool, 1) == 4
    assert num_slots_for(pool, 1 << 30) == 64
    assert num_slots_for(DeviceMemory(2, 4096), 1) == 2


def test_nothing_is_left_of_an_area_that_was_closed() -> None:
    before = set(os.listdir("/proc/self/fd"))
    area = StagingArea(4, 4096)
    undone: list[bool] = []
    area.before_close = lambda: undone.append(True)
    area.write_blocks([3], [b"x" * 4096])
    target = bytearray(4096)
    with memoryview(target) as view:
        area.copy_blocks([3], [view])
    assert bytes(area.read_blocks([3])[0]) == target == b"x" * 4096
    assert "memfd:baton-staging" in Path("/proc/self/maps").read_text()
    area.close()
    area.close()
    assert undone == [True]
    assert "memfd:baton-staging" not in Path("/proc/self/maps").read_text()
    assert set(os.listdir("/proc/self/fd")) == before
