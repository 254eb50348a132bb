"""Tests NIXL's offers and agents: which offers are taken, what is done with a lease that ended, and when an agent is
ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from baton.v1 import types_pb2
from services.core.errors import LayoutMismatch, LeaseInvalid, ProtocolViolation, StaleIncarnation
from services.core.ids import new_incarnation
from services.kv.imports import ImportState
from services.kv.regions import Region
from services.kvtransfer.client import FetchOrder
from services.kvtransfer.transports import nixl, nixl_agent
from services.kvtransfer.transports.nixl import Card, NixlDestination, NixlSource, whole
from services.kvtransfer.transports.nixl_agent import NixlUnavailable
from tests.support.kv_harness import LAYOUT, UCX, Destination, Source, running, until
from tests.support.kv_memory import Gate, MemfdMemory

pytestmark = pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")


def offering(order: FetchOrder, metadata: bytes) -> FetchOrder:
    order.source.offers[0].nixl_metadata = metadata
    return order


class TestOffers:
    async def test_a_member_whose_offer_makes_no_sense(self) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            lease = source.lease(40, sealed=True)
            card = Card.of_offer(source.nixl.offer().nixl_metadata)
            for offered, error in [
                (Card(new_incarnation(), card.hello, card.pool, card.block_bytes, card.metadata), StaleIncarnation),
                (Card(card.incarnation, card.hello, card.pool, card.block_bytes // 2, card.metadata), LayoutMismatch),
                (Card(card.incarnation, Region(8, 4096, "cpu"), card.pool, card.block_bytes, card.metadata), None),
                (Card(card.incarnation, card.hello, card.pool, card.block_bytes, b"no metadata"), None),
            ]:
                order = offering(destination.order(source, lease, transport="nixl"), offered.to_offer())
                with pytest.raises(error or NixlUnavailable):
                    await destination.fetcher.fetch(order)
                assert len(destination.nixl) == 0
            assert (await destination.fetch(source, lease, leg=2, transport="nixl")).ready

    @pytest.mark.parametrize("offered", [b"", b"bat-nixl", b"another form" * 20])
    def test_bytes_that_are_no_offer(self, offered: bytes) -> None:
        with pytest.raises(ProtocolViolation, match="NIXL offer"):
            Card.of_offer(offered)

    async def test_a_source_that_nixl_does_not_reach_is_fetched_from_otherwise(self) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            lease = source.lease(40, sealed=True)
            order = destination.order(source, lease, transport="nixl")
            card = Card.of_offer(order.source.offers[0].nixl_metadata)
            lost = Card(card.incarnation, Region(8, 4096, "cpu"), card.pool, card.block_bytes, card.metadata)
            offering(order, lost.to_offer()).source.offers.add(transport=types_pb2.TRANSPORT_GRPC)
            assert (await destination.fetcher.fetch(order)).transport == types_pb2.TRANSPORT_GRPC

    async def test_another_process_where_the_source_was(self) -> None:
        """The hello says whose memory is read."""
        source, destination = Source(), Destination()
        async with running(source, destination):
            lease = source.lease(40, sealed=True)
            order = destination.order(source, lease, transport="nixl")
            assert source.nixl.end is not None
            source.nixl.end._hello.bytes[:16] = b"bat-nixl" + bytes(8)
            with pytest.raises(StaleIncarnation, match="another process"):
                await destination.fetcher.fetch(order)
            source.table.abort(lease.lease_id, 0.0)


async def test_what_is_read_of_a_fenced_lease_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks have another owner by then, which the source cannot keep a reader from."""
    source, slow, quick = Source(), Destination(), Destination()
    async with running(source, slow, quick):
        assert (await slow.fetch(source, source.lease(16, sealed=True), transport="nixl")).ready
        gate, read = Gate(), nixl_agent.NixlAgent.read

        def late(agent: nixl_agent.NixlAgent, *read_of: object) -> None:
            if agent in slow.nixl.agents:
                gate.enter()
            read(agent, *read_of)

        monkeypatch.setattr(nixl_agent.NixlAgent, "read", late)
        lease = source.lease(40, sealed=True)
        order = slow.order(source, lease, leg=1, transport="nixl")
        fetch = slow.start(order)
        await gate.entered()
        expected = source.expected(lease)
        assert (await quick.fetch(source, lease, leg=2, transport="nixl")).ready
        for block_id in lease.block_ids:
            source.memory.fill(block_id, 999)
        gate.open()
        with pytest.raises(LeaseInvalid):
            await fetch
        await until(lambda: order.import_.state is ImportState.FREED)
        assert set(slow.holds(order.targets)).isdisjoint(expected), "it was read too soon to show anything"


class TestAgents:
    async def test_a_probe_says_how_fast_it_is(self) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            assert await destination.nixl.probe(source.where, source.nixl.offer()) > 0
            assert len(destination.nixl) == 1

    async def test_one_for_each_source_and_its_fetches(self) -> None:
        sources, destination = [Source(), Source()], Destination()
        async with running(*sources, destination):
            leases = [(source, source.lease(40, sealed=True)) for source in sources for _ in range(3)]
            outcomes = [destination.fetch(source, lease, transport="nixl") for source, lease in leases]
            assert all(outcome.ready for outcome in await asyncio.gather(*outcomes))
            assert len(destination.nixl) == 2

    async def test_who_leaves_while_an_agent_is_made_harms_nobody(self) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            first, second = source.lease(40, sealed=True), source.lease(40, sealed=True)
            leaving = destination.start(destination.order(source, first, transport="nixl"))
            staying = destination.start(destination.order(source, second, transport="nixl"))
            await until(lambda: any(task.get_name() == "kv-nixl-meet" for task in asyncio.all_tasks()))
            leaving.cancel()
            assert (await staying).ready
            assert len(destination.nixl) == 1
            source.table.abort(first.lease_id, 0.0)

    async def test_one_that_nobody_uses_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nixl, "_IDLE_S", 0.05)
        source, destination = Source(), Destination()
        async with running(source, destination):
            for _ in range(2):
                lease = source.lease(40, sealed=True)
                assert (await destination.fetch(source, lease, transport="nixl")).ready
                await until(lambda: len(destination.nixl) == 0)

    async def test_a_destination_that_closes_while_an_agent_is_made(self) -> None:
        source, memory = Source(), MemfdMemory(4, LAYOUT.block_bytes)
        async with running(source):
            where, offer = source.where, source.nixl.offer()
            end = NixlDestination(memory, ucx=UCX)
            meeting = asyncio.create_task(end._peer(where, offer))
            await until(lambda: any(task.get_name() == "kv-nixl-meet" for task in asyncio.all_tasks()))
            end.close()
            await asyncio.wait([meeting])
            assert len(end) == 0
        memory.close()


class TestMemory:
    def test_a_pool_in_pieces_is_not_offered(self) -> None:
        class Pieces:
            num_blocks, block_bytes = 3, 64

            def region(self, block_id: int) -> Region:
                return Region(4096 + 128 * block_id, 64, "cpu")

        with pytest.raises(NixlUnavailable, match="one piece"):
            whole(Pieces())  # type: ignore[arg-type]

    @pytest.mark.parametrize("regions", [[Region(4096, 64, "tpu:0")], [Region(4096, 64, "mps")]])
    def test_memory_that_nixl_does_not_know(self, regions: Sequence[Region]) -> None:
        agent = nixl_agent.NixlAgent("a", serves=False, ucx=UCX)
        with pytest.raises(NixlUnavailable, match="cannot register"):
            agent.register(regions[0])
        agent.close()

    async def test_a_source_without_nixl(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nixl_agent, "_PACKAGES", ("nixl_of_nobody",))
        source = Source()
        async with running(source):
            assert not nixl_agent.is_installed()
            with pytest.raises(NixlUnavailable, match=r"baton-serving\[nixl\]"):
                NixlSource(source.memory, source.reader, 1, ucx=UCX)
