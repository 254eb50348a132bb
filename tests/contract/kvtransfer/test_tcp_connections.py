"""Tests the connections on which a destination reads blocks: how long they are kept, and what ends them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.core.errors import StaleIncarnation
from services.core.ids import new_incarnation
from services.kvtransfer.transports import tcp_source
from services.kvtransfer.transports.tcp import NUM_CONNECTIONS
from tests.support import kv_harness
from tests.support.kv_harness import LAYOUT, Destination, Source, running, until
from tests.support.kv_memory import Gate

pytestmark = pytest.mark.usefixtures("plain_or_tls")


class TestConnections:
    async def test_they_are_kept_for_the_next_fetch(self) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            for _ in range(3):
                assert (await destination.fetch(source, source.lease(40, sealed=True), transport="tcp")).ready
                await until(lambda: destination.sockets.num_idle == NUM_CONNECTIONS)
            assert source.tcp.num_connections == NUM_CONNECTIONS

    async def test_they_block_again_after_the_event_loop_has_watched_them(self) -> None:
        """Tests it on uvloop, as all here: it makes the sockets that it watches non-blocking."""
        source, destination = Source(), Destination()
        async with running(source, destination):
            for _ in range(3):
                lease = source.lease(40)
                order = destination.order(source, lease, transport="tcp")
                fetch = destination.start(order)
                await until(lambda lease=lease: lease.fetch is not None)
                source.seal(lease)
                assert (await fetch).ready
                assert destination.holds(order.targets) == source.expected(lease)
                await until(lambda: destination.sockets.num_idle == NUM_CONNECTIONS)
                for connection in next(iter(destination.sockets._idle.values())):
                    assert not os.get_blocking(connection.fileno()), "uvloop watches it"
            for connection in destination.sockets._take(source.incarnation):
                assert os.get_blocking(connection.fileno()) is (kv_harness.TLS is None), "TLS never blocks"
                connection.close()

    async def test_they_go_with_their_source(self) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            assert (await destination.fetch(source, source.lease(40, sealed=True), transport="tcp")).ready
            source.tcp.close()
            await until(lambda: not destination.sockets.num_idle)

    async def test_copies_are_under_way_on_each_of_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tcp_source, "MOST_BYTES", LAYOUT.block_bytes)
        source, destination = Source(), Destination(checksums=True)
        destination.memory.gate = gate = Gate()
        async with running(source, destination):
            lease = source.lease(16 * 5, sealed=True)
            order = destination.order(source, lease, transport="tcp")
            fetch = destination.start(order)
            await gate.entered()
            await until(lambda: order.import_.num_copies == 2 * NUM_CONNECTIONS)
            destination.memory.gate = None
            gate.open()
            assert (await fetch).ready
            assert destination.holds(order.targets) == source.expected(lease)

    async def test_copies_end_although_there_are_fewer_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tcp_source, "MOST_BYTES", LAYOUT.block_bytes)
        source, destination = Source(), Destination()
        destination.sockets.threads.shutdown()
        destination.sockets.threads = ThreadPoolExecutor(1, thread_name_prefix="kv-tcp")
        async with running(source, destination):
            leases = [source.lease(16 * 5, sealed=True) for _ in range(3)]
            orders = [destination.order(source, lease, transport="tcp") for lease in leases]
            for fetch in [destination.start(order) for order in orders]:
                assert (await fetch).ready
            for order, lease in zip(orders, leases, strict=True):
                assert destination.holds(order.targets) == source.expected(lease)

    async def test_a_restarted_source_gets_new_ones(self) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            assert (await destination.fetch(source, source.lease(40, sealed=True), transport="tcp")).ready
            lease = source.lease(40, sealed=True)
            order = destination.order(source, lease, transport="tcp")
            order.source.incarnation = new_incarnation()
            with pytest.raises(StaleIncarnation):
                await destination.fetcher.fetch(order)
            source.table.abort(lease.lease_id, 0.0)
