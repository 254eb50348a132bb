"""Tests what becomes of sockets by which a source is not reached, and of probes that are given up."""

from __future__ import annotations

import asyncio

import pytest

from baton.v1 import types_pb2
from services.core.addresses import join
from services.kvtransfer import connecting
from services.kvtransfer.client import FetchOutcome
from services.kvtransfer.transports import PROBE_BYTES
from services.kvtransfer.transports.grpc import GrpcDestination
from services.kvtransfer.transports.tcp import NUM_CONNECTIONS, Connection
from services.kvtransfer.transports.tcp_destination import TcpCopier
from tests.support.kv_harness import LAYOUT, Destination, Source, running, until
from tests.support.kv_memory import Gate
from tests.support.stuck_source import Stuck

pytestmark = pytest.mark.usefixtures("plain_or_tls")


async def test_a_probe_that_is_given_up_closes_no_connection_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread would read what is meant for another connection, which has the number of the closed one by then."""
    probe, close = TcpCopier.probe, Connection.close
    gate, closed = Gate(), list[Connection]()

    def end_late(self: TcpCopier) -> float:
        try:
            return probe(self)
        finally:
            gate.enter()

    def note(self: Connection) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(TcpCopier, "probe", end_late)
    monkeypatch.setattr(Connection, "close", note)

    destination, stuck = Destination(), Stuck(5, granted=PROBE_BYTES)
    async with running(destination), stuck.running() as offer:
        probing = asyncio.create_task(destination.sockets.probe(types_pb2.KVSource(incarnation=5), offer))
        await stuck.asked.wait()
        probing.cancel()
        await asyncio.wait([probing])
        await gate.entered()
        assert not closed
        gate.open()
        await stuck.left.wait()
        await until(lambda: len(closed) == 1)


async def test_a_probe_for_which_there_is_no_thread_keeps_no_connection() -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        destination.sockets.threads.shutdown()
        with pytest.raises(RuntimeError):
            await destination.sockets.probe(source.where, source.tcp.offer())
        assert destination.sockets.num_idle == NUM_CONNECTIONS


async def test_a_socket_where_nobody_answers_is_waited_for_once() -> None:
    """A firewall makes such a socket of a port that is not opened. Fetches go by what works."""
    num_dialled = 0

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_dialled
        num_dialled += 1
        await reader.read()
        writer.close()

    source, destination = Source(), Destination()
    destination.sockets._timeout_s = 0.05
    destination.fetcher._connector.transports = [destination.sockets, GrpcDestination(LAYOUT.block_bytes)]
    async with running(source, destination), await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:

        async def fetch() -> FetchOutcome:
            order = destination.order(source, source.lease(40, sealed=True))
            for offer in order.source.offers:
                if offer.transport == types_pb2.TRANSPORT_TCP:
                    offer.tcp_address = join(*server.sockets[0].getsockname()[:2])
            return await destination.fetcher.fetch(order)

        assert (await fetch()).transport == types_pb2.TRANSPORT_GRPC
        await until(lambda: destination.fetcher._connector.choice.knows(source.incarnation))
        dialled = num_dialled
        assert dialled > 0
        for _ in range(3):
            assert (await fetch()).transport == types_pb2.TRANSPORT_GRPC
        assert num_dialled == dialled


async def test_a_socket_that_was_not_reached_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine was busy for a moment, or its firewall lacked a rule."""
    monkeypatch.setattr(connecting, "RETRY_S", 0.0)
    source, destination = Source(), Destination()
    connector = destination.fetcher._connector
    connector.transports = [destination.sockets, GrpcDestination(LAYOUT.block_bytes)]
    async with running(source, destination):
        order = destination.order(source, source.lease(40, sealed=True))
        for offer in order.source.offers:
            if offer.transport == types_pb2.TRANSPORT_TCP:
                offer.tcp_address = "127.0.0.1:1"
        assert (await destination.fetcher.fetch(order)).transport == types_pb2.TRANSPORT_GRPC
        await until(lambda: connector._probing is None)
        taken = []
        for _ in range(2):
            taken.append((await destination.fetch(source, source.lease(40, sealed=True))).transport)
            await until(lambda: connector._probing is None)
        assert taken == [types_pb2.TRANSPORT_GRPC, types_pb2.TRANSPORT_TCP]
