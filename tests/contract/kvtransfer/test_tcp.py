"""Tests the sockets that blocks are read from: who is answered, what is given, and what ends a connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest

from baton.v1 import types_pb2
from services.core.addresses import parse
from services.core.errors import (
    ConfigError,
    LeaseInvalid,
    ProtocolViolation,
    StaleIncarnation,
    TransferFailed,
)
from services.kv.imports import ImportState
from services.kvtransfer.transports import PROBE_BYTES, FetchName, tcp_source
from services.kvtransfer.transports.tcp import (
    GREETING,
    INTRODUCTION,
    NUM_CONNECTIONS,
    PROBE,
    PROOF_BYTES,
    REQUEST,
    Connection,
    Proofs,
)
from services.kvtransfer.transports.tcp_destination import TcpUnavailable
from services.kvtransfer.transports.tcp_source import TcpSource
from tests.support import kv_harness
from tests.support.kv_harness import Destination, Source, running, until
from tests.support.stuck_source import Stuck
from tests.support.tcp_peer import connected
from tests.support.trusted import CLUSTER_TOKEN

pytestmark = pytest.mark.usefixtures("plain_or_tls")


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


class TestWhoIsAnswered:
    async def test_nobody_without_the_token(self) -> None:
        source = Source()
        async with running(source):
            async with connected(source) as stranger:
                assert await stranger.introduce("another-token-of-16-characters") == b""
            async with connected(source) as silent:
                assert len(await silent.read(GREETING.size)) == GREETING.size
                silent.socket.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(INTRODUCTION.size))
                assert await silent.read(1) == b""

    async def test_a_proof_is_good_for_one_connection(self) -> None:
        source = Source()
        async with running(source), connected(source) as first, connected(source) as second:
            _, incarnation, nonce = GREETING.unpack(await first.read(GREETING.size))
            await second.read(GREETING.size)
            proofs = Proofs.of(CLUSTER_TOKEN, incarnation, nonce, b"n" * 32)
            said = INTRODUCTION.pack(b"n" * 32, proofs.destination)
            first.socket.sendall(said)
            assert await first.read(PROOF_BYTES) == proofs.source
            second.socket.sendall(said)
            assert await second.read(PROOF_BYTES) == b""

    async def test_who_says_nothing_is_hung_up_on(self) -> None:
        source = Source(silence_s=0.2)
        async with running(source), connected(source) as silent:
            await silent.read(GREETING.size)
            assert await silent.read(1) == b""

    async def test_who_does_not_read_is_hung_up_on(self) -> None:
        source = Source(silence_s=0.2)
        async with running(source), connected(source) as deaf:
            assert await deaf.introduce()
            for _ in range(16):  # more than the kernel keeps for somebody who does not read
                deaf.socket.sendall(REQUEST.pack(PROBE, 0, 0, PROBE_BYTES >> 10))
            await until(lambda: source.tcp.num_connections == 0)

    async def test_one_for_whom_there_is_no_thread_is_hung_up_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in a container that may have no more of them. Those who come when there is one are served again."""
        source = Source()
        async with running(source):
            with monkeypatch.context() as no_threads:
                no_threads.setattr(threading.Thread, "start", no_thread)
                with socket.create_connection(parse(source.tcp.address)) as refused:
                    refused.setblocking(False)
                    assert await asyncio.get_running_loop().sock_recv(refused, 1) == b""
            assert source.tcp.num_connections == 0
            async with connected(source) as peer:
                assert await peer.introduce()

    async def test_strangers_do_not_take_the_places_of_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tcp_source, "MAX_STRANGERS", 2)
        source, destination = Source(), Destination()
        async with running(source, destination), connected(source) as known:
            assert await known.introduce()
            async with contextlib.AsyncExitStack() as strangers:
                for _ in range(20):
                    stranger = await strangers.enter_async_context(connected(source))
                    assert len(await stranger.read(GREETING.size)) == GREETING.size
                await until(lambda: source.tcp.num_connections <= 4)  # whoever is longest a stranger goes
                lease = source.lease(40, sealed=True)
                assert (await destination.fetch(source, lease, transport="tcp")).ready
                assert len(await known.ask(PROBE, 0, 0, 1)) == 1024, "nobody else is disturbed"

    async def test_one_that_is_closed_is_not_ended_once_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its descriptor may be another's by then."""
        closing, may_close = threading.Event(), threading.Event()
        closed, ended_late = set[Connection](), set[Connection]()
        close, interrupt = Connection.close, Connection.interrupt

        def close_slowly(self: Connection) -> None:
            close(self)
            closed.add(self)
            closing.set()
            may_close.wait(10.0)

        def note(self: Connection) -> None:
            ended_late.update({self} & closed)
            interrupt(self)

        monkeypatch.setattr(Connection, "close", close_slowly)
        monkeypatch.setattr(Connection, "interrupt", note)
        source = Source()
        async with running(source):
            async with connected(source) as peer:
                await peer.read(GREETING.size)
            assert await asyncio.to_thread(closing.wait, 10.0)
            threading.Timer(0.1, may_close.set).start()
            source.tcp.close()
        assert not ended_late

    async def test_connections_are_limited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tcp_source, "MAX_CONNECTIONS", 1)
        source = Source()
        async with running(source), connected(source) as first:
            assert await first.introduce()
            async with connected(source) as second:
                assert await second.read(1) == b""

    async def test_connections_that_came_while_there_was_room_are_limited_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A connection counts from the moment in which it is let in, however many were made before."""
        monkeypatch.setattr(tcp_source, "MAX_CONNECTIONS", 2)
        source = Source()
        async with running(source), contextlib.AsyncExitStack() as connections:
            peers = [await connections.enter_async_context(connected(source)) for _ in range(8)]
            proofs = await asyncio.gather(*(peer.introduce() for peer in peers))
            let_in = [peer for peer, proof in zip(peers, proofs, strict=True) if proof]
            assert len(let_in) == 2
            for peer in let_in:
                assert len(await peer.ask(PROBE, 0, 0, 1)) == 1024

    async def test_a_port_that_is_taken_names_the_flag(self) -> None:
        source = Source()
        async with running(source):
            with pytest.raises(ConfigError, match="--kv-port"):
                TcpSource(source.memory, source.reader, 1, CLUSTER_TOKEN, port=parse(source.tcp.address)[1])


class TestWhatIsGiven:
    async def test_what_was_announced_to_the_fetch_and_nothing_else(self) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination), connected(source) as peer:
            await peer.introduce()
            lease = source.lease(40)
            fetch = destination.start(destination.order(source, lease, leg=2, transport="tcp", first_block=1))
            source.publish(lease, 32)
            await until(lambda: lease.fetch is not None and lease.fetch.copied == 2)
            _, second, third = source.expected(lease)
            assert await peer.ask(lease.lease_id, 2, 1, 1) == second
            for what in (
                (b"?" * 16, 2, 1, 1),
                (lease.lease_id, 1, 1, 1),
                (lease.lease_id, 3, 1, 1),
                (lease.lease_id, 2, 0, 1),  # it was not asked for
                (lease.lease_id, 2, 2, 1),  # it is not computed yet
                (lease.lease_id, 2, 1, 2),
                (lease.lease_id, 2, 1, 0),
                (lease.lease_id, 2, 1, (1 << 32) - 1),
                (lease.lease_id, 2, (1 << 32) - 1, 1),
            ):
                assert await peer.ask(*what) is None, what
            source.seal(lease)
            assert (await fetch).ready
            assert third != second
            assert await peer.ask(lease.lease_id, 2, 1, 1) is None, "it was released"

    async def test_nothing_of_a_fenced_or_aborted_lease(self) -> None:
        source, older, newer = Source(), Destination(), Destination()
        async with running(source, older, newer), connected(source) as peer:
            await peer.introduce()
            lease = source.lease(40)
            losing = older.start(older.order(source, lease, leg=3, transport="tcp"))
            source.publish(lease, 16)
            await until(lambda: lease.fetch is not None and lease.fetch.copied == 1)
            assert await peer.ask(lease.lease_id, 3, 0, 1) == source.expected(lease)[0]
            other = newer.start(newer.order(source, lease, leg=4, transport="tcp"))
            with pytest.raises(LeaseInvalid, match="higher leg"):
                await losing
            assert await peer.ask(lease.lease_id, 3, 0, 1) is None
            # What it says of its copy is not on its way any more: grpc.aio would report that it met the end
            # (grpc/grpc#36066).
            await until(lambda: lease.fetch is not None and (lease.fetch.leg, lease.fetch.copied) == (4, 1))
            source.table.abort(lease.lease_id, 0.0)
            with pytest.raises(LeaseInvalid, match="aborted"):
                await other
            assert await peer.ask(lease.lease_id, 4, 0, 1) is None

    async def test_a_pool_that_cannot_be_mapped(self) -> None:
        source, destination = Source(num_slots=4), Destination()
        async with running(source, destination):
            lease = source.lease(320, sealed=True)
            order = destination.order(source, lease, transport="tcp")
            assert (await destination.fetcher.fetch(order)).transport == types_pb2.TRANSPORT_TCP
            assert destination.holds(order.targets) == source.expected(lease)


class TestBadSources:
    async def test_one_that_does_not_have_the_token(self) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination):
            lease = source.lease(40, sealed=True)
            async with Stuck(source.incarnation, token="another-token-of-16-characters").running() as offer:
                order = destination.order(source, lease)
                order.source.ClearField("offers")
                order.source.offers.append(offer)
                with pytest.raises(ProtocolViolation, match="cluster token"):
                    await destination.fetcher.fetch(order)
            source.table.abort(lease.lease_id, 0.0)

    async def test_one_that_is_another_process_or_no_worker(self) -> None:
        destination = Destination()
        async with running(destination):
            fetch = FetchName(b"i" * 16, 1)
            where = types_pb2.KVSource(incarnation=5)
            async with Stuck(6).running() as offer:
                with pytest.raises(StaleIncarnation):
                    await destination.sockets.connect(where, offer, fetch)
            other = Stuck(5)
            other.magic = b"SSH-2.0-"
            async with other.running() as offer:
                with pytest.raises(ProtocolViolation, match="no socket"):
                    await destination.sockets.connect(where, offer, fetch)

    @pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:1", "no-such-host.invalid:7000", "a\0b:1"])
    async def test_an_address_where_nothing_answers(self, address: str) -> None:
        destination = Destination()
        async with running(destination):
            is_tls = kv_harness.TLS is not None
            offer = types_pb2.KVOffer(transport=types_pb2.TRANSPORT_TCP, tcp_address=address, tcp_tls=is_tls)
            with pytest.raises(TcpUnavailable):
                await destination.sockets.connect(types_pb2.KVSource(), offer, FetchName(b"i" * 16, 1))

    async def test_one_that_sends_too_much(self) -> None:
        source, destination = Source(), Destination()
        stuck = Stuck(source.incarnation, granted=1 << 60, sent=0)
        async with running(source, destination), stuck.running() as offer:
            lease = source.lease(40, sealed=True)
            order = destination.order(source, lease, transport="tcp")
            order.source.offers[0].CopyFrom(offer)
            with pytest.raises(ProtocolViolation, match="bytes for blocks"):
                await destination.fetcher.fetch(order)
            await until(stuck.left.is_set)  # a later fetch would take for its own what still comes
            source.table.abort(lease.lease_id, 0.0)

    async def test_one_that_stops_within_a_message(self) -> None:
        """The copy ends by its silence, and with it the import; other fetches go on meanwhile."""
        source, destination = Source(), Destination(silence_s=0.3)
        stuck = Stuck(source.incarnation)
        async with running(source, destination), stuck.running() as offer:
            held = destination.order(source, source.lease(40, sealed=True), transport="tcp")
            held.source.offers[0].CopyFrom(offer)
            fetch = destination.start(held)
            await stuck.asked.wait()
            assert (await destination.fetch(source, source.lease(40, sealed=True), transport="grpc")).ready
            with pytest.raises(TransferFailed, match="silent"):
                await fetch
            await until(lambda: held.import_.state is ImportState.FREED)
            source.table.abort(held.lease_id, 0.0)

    async def test_one_whose_connection_is_cut_within_a_block(self) -> None:
        """Nothing of the block is used, and the same lease is fetched again by a connection that is whole."""
        source, destination = Source(), Destination()
        stuck = Stuck(source.incarnation, cuts=True)
        async with running(source, destination), stuck.running() as offer:
            lease = source.lease(40, sealed=True)
            order = destination.order(source, lease, transport="tcp")
            order.source.offers[0].CopyFrom(offer)
            with pytest.raises(TransferFailed, match="within a message"):
                await destination.fetcher.fetch(order)
            await until(lambda: order.import_.state is ImportState.FREED)
            assert (await destination.fetch(source, lease, leg=2, transport="tcp")).ready

    async def test_a_cancel_within_a_message_closes_the_connection_and_frees_the_blocks(self) -> None:
        source, destination = Source(), Destination()
        stuck = Stuck(source.incarnation)
        async with running(source, destination), stuck.running() as offer:
            order = destination.order(source, source.lease(40, sealed=True), transport="tcp")
            order.source.offers[0].CopyFrom(offer)
            fetch = destination.start(order)
            await stuck.asked.wait()
            fetch.cancel()
            await asyncio.wait([fetch])
            await until(lambda: order.import_.state is ImportState.FREED)
            assert order.import_.num_copies == 0
            await stuck.left.wait()
            assert destination.sockets.num_idle == NUM_CONNECTIONS - 1, "those that were not in use"
            source.table.abort(order.lease_id, 0.0)


class TestProbes:
    async def test_the_first_fetch_waits_for_none_and_then_the_fastest_is_taken(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One that its probe or later fetches show to be slow is not taken."""
        caplog.set_level("INFO")
        source, destination = Source(), Destination()
        async with running(source, destination):

            async def by() -> types_pb2.Transport:
                return (await destination.fetch(source, source.lease(40, sealed=True))).transport

            assert await by() == types_pb2.TRANSPORT_SHM
            await until(lambda: destination.fetcher._connector.choice.knows(source.incarnation))
            rates = destination.fetcher._connector.choice._rates[source.incarnation]
            assert set(rates) == {types_pb2.TRANSPORT_SHM, types_pb2.TRANSPORT_TCP}
            assert all(1e6 < rate < 1e13 for rate in rates.values())
            assert "a probe says" in caplog.text
            rates[types_pb2.TRANSPORT_SHM] = 1e6
            assert await by() == types_pb2.TRANSPORT_TCP
            source.tcp.close()
            assert await by() == types_pb2.TRANSPORT_SHM
            choice = destination.fetcher._connector.choice
            await until(lambda: choice.rate(source.incarnation, types_pb2.TRANSPORT_TCP) == 0.0)

    async def test_no_block_is_read_by_one(self) -> None:
        source, destination = Source(), Destination()
        async with running(source, destination), connected(source) as peer:
            source.lease(40, sealed=True)
            await peer.introduce()
            few, all_of_it = await peer.ask(PROBE, 0, 0, 4), await peer.ask(PROBE, 7, 0, (1 << 32) - 1)
            assert (len(few), len(all_of_it)) == (4096, PROBE_BYTES)
            assert 0 not in few + all_of_it, "memory that was never written is one page, which is too fast"
            source.table.abort(next(iter(source.table)).lease_id, 0.0)
