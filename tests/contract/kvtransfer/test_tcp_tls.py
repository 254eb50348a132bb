"""Tests blocks that are read inside TLS: what passes, and that nobody takes or gives one who is not of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from baton.v1 import types_pb2
from services.core.addresses import parse
from services.core.errors import ProtocolViolation
from services.kvtransfer.transports import FetchName, tcp_source
from services.kvtransfer.transports.tcp import GREETING, REQUEST
from services.kvtransfer.transports.tcp_destination import TcpDestination, TcpUnavailable
from services.kvtransfer.transports.tcp_source import TcpSource
from services.rpc.certificates import Certificates
from tests.support import kv_harness
from tests.support.certificates import certificates, naming, written
from tests.support.kv_harness import Destination, Source, running, until
from tests.support.patience import HANG_S
from tests.support.trusted import CLUSTER_TOKEN

FETCH = FetchName(b"i" * 16, 1)
STRANGE_NAMES = [
    ([b"spiffe://baton/worker\xff"], "has names that cannot be read"),
    ([b"spiffe://baton/worker\0x"], r"is of spiffe://baton/worker\x00x"),
    ([b"spiffe://baton/\x1b[2J\nworker"], r"is of spiffe://baton/\x1b[2J\nworker"),
    ([b"spiffe://baton/worker"] * 100, "is of spiffe://baton/worker and spiffe://baton/worker"),
    ([b"spiffe://baton/" + b"r" * 60_000], "is of spiffe://baton/rrrr"),
]


@pytest.fixture
def tls(certified: Path, monkeypatch: pytest.MonkeyPatch) -> Certificates:
    """Has sources and destinations use the certificate of a worker."""
    worker = certificates(certified, "worker")
    monkeypatch.setattr(kv_harness, "TLS", worker)
    return worker


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with certificates of another CA."""
    return written(tmp_path_factory.mktemp("elsewhere"))


@contextlib.contextmanager
def stranger(source: Source) -> AsyncIterator[socket.socket]:
    with socket.create_connection(parse(source.tcp.address), 5.0) as connected:
        yield connected


def taken(connected: socket.socket) -> bytes:
    """Returns what the source says until it hangs up."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connected.recv(4096):
            data += part
    return data


def knock(source: Source, context: ssl.SSLContext) -> str:
    """Shakes hands as the context does, and asks for the greeting. Returns why there is none."""
    try:
        with stranger(source) as plain, context.wrap_socket(plain, server_hostname="localhost") as tls:
            assert tls.recv(GREETING.size) == b"", "a stranger is told something"
        return "hung up"
    except ssl.SSLError as error:
        return str(error.reason)
    except ConnectionError:
        return "hung up"


async def meet(destination: TcpDestination, source: Source) -> None:
    """Has the destination connect to the source, by new connections."""
    try:
        copier = await destination.connect(source.where, source.tcp.offer(), FETCH)
        copier.pin()
        destination._closed = True  # so that none is kept
        copier.unpin()
    finally:
        destination._closed = False


class TestWhoIsLetIn:
    @pytest.mark.parametrize("token", [CLUSTER_TOKEN, ""], ids=["with the token", "by certificates alone"])
    @pytest.mark.parametrize("role", ["worker", "store"])
    async def test_workers_and_stores(
        self, tls: Certificates, certified: Path, monkeypatch: pytest.MonkeyPatch, role: str, token: str
    ) -> None:
        destination = Destination(checksums=True)
        monkeypatch.setattr(kv_harness, "TLS", certificates(certified, role))
        source = Source()
        source.tcp._server._token = destination.sockets._token = token
        async with running(source, destination):
            lease = source.lease(200, sealed=True)
            order = destination.order(source, lease, transport="tcp")
            assert (await destination.fetcher.fetch(order)).transport == types_pb2.TRANSPORT_TCP
            assert destination.holds(order.targets) == source.expected(lease)

    async def test_nobody_else(
        self, tls: Certificates, certified: Path, elsewhere: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        source = Source()
        nobody = ssl.create_default_context(cafile=str(certified / "ca.pem"))
        # Of the cluster's CA, which it trusts, with a certificate of another.
        foreign = ssl.create_default_context(cafile=str(certified / "ca.pem"))
        foreign.load_cert_chain(elsewhere / "worker.pem", elsewhere / "worker.key")
        async with running(source):
            assert await asyncio.to_thread(knock, source, nobody) == "TLSV13_ALERT_CERTIFICATE_REQUIRED"
            assert await asyncio.to_thread(knock, source, foreign) == "TLSV1_ALERT_UNKNOWN_CA"
            for role in ("router", "operator", "client"):
                other = certificates(certified, role).peer_context()
                assert await asyncio.to_thread(knock, source, other) == "hung up", role
            assert "refused 127.0.0.1: it does not shake hands: peer did not return a certificate" in caplog.text
            await until(lambda: not source.tcp.num_connections)

    async def test_a_role_that_is_refused_is_named(
        self, tls: Certificates, certified: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        source = Source()
        async with running(source):
            await asyncio.to_thread(knock, source, certificates(certified, "client").peer_context())
            await until(lambda: "its certificate is of spiffe://baton/client" in caplog.text)

    @pytest.mark.parametrize(("uris", "why"), STRANGE_NAMES)
    async def test_names_of_any_bytes_are_refused_in_a_short_line(
        self,
        tls: Certificates,
        tmp_path: Path,
        certified: Path,
        caplog: pytest.LogCaptureFixture,
        uris: list[bytes],
        why: str,
    ) -> None:
        written(tmp_path, {name: (certified / name).read_bytes() for name in ("ca.pem", "ca.key")})
        context = naming(tmp_path, "strange", *uris).peer_context()
        source = Source()
        async with running(source):
            assert await asyncio.to_thread(knock, source, context) == "hung up"
            await until(lambda: f"refused 127.0.0.1: its certificate {why}" in caplog.text)
        assert all(len(record.getMessage()) < 400 for record in caplog.records)

    async def test_not_by_a_certificate_alone_where_a_token_is_asked_for(self, tls: Certificates) -> None:
        source, destination = Source(), Destination()
        destination.sockets._token = "another-token-of-16-characters"
        async with running(source, destination):
            offer = source.tcp.offer()
            with pytest.raises(TcpUnavailable):
                await destination.sockets.connect(source.where, offer, FETCH)

    @pytest.mark.parametrize(
        "said", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", REQUEST.pack(b"i" * 16, 1, 0, 1) * 9], ids=["HTTP", "a request"]
    )
    async def test_nobody_in_clear(self, tls: Certificates, said: bytes, caplog: pytest.LogCaptureFixture) -> None:
        source = Source()
        async with running(source):
            with stranger(source) as plain:
                plain.sendall(said)
                answer = await asyncio.to_thread(taken, plain)
                assert len(answer) <= 7, "an alert of TLS at the most"
            await until(lambda: "it does not shake hands" in caplog.text)

    async def test_nothing_is_said_before_the_handshake(self, tls: Certificates) -> None:
        source = Source(silence_s=0.2)
        async with running(source):
            with stranger(source) as plain:
                assert await asyncio.to_thread(taken, plain) == b""


class TestHandshakes:
    async def test_one_that_drips_is_ended_in_time(self, tls: Certificates) -> None:
        source = Source(silence_s=0.3)
        hello = ssl.MemoryBIO()
        client = tls.peer_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        async with running(source):
            with stranger(source) as plain:
                async with asyncio.timeout(HANG_S):
                    for byte in hello.read():
                        try:
                            plain.sendall(bytes([byte]))
                        except ConnectionError:
                            break
                        await asyncio.sleep(0.05)
                    else:
                        pytest.fail("it was never ended")
            await until(lambda: not source.tcp.num_connections)

    async def test_half_done_ones_keep_nobody_out(self, tls: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tcp_source, "MAX_STRANGERS", 2)
        source, destination = Source(), Destination()
        async with running(source, destination):
            with contextlib.ExitStack() as strangers:
                for _ in range(20):
                    strangers.enter_context(stranger(source)).sendall(b"\x16\x03\x01")
                    await until(lambda: source.tcp.num_connections <= 4)
                assert (await destination.fetch(source, source.lease(40, sealed=True), transport="tcp")).ready

    async def test_they_are_made_by_the_certificates_of_now(self, tmp_path: Path, certified: Path) -> None:
        """A source whose CA was replaced lets in who has one of the new CA, and nobody of the old one."""
        folder = written(tmp_path / "changing")
        source = Source()
        source.tcp.close()
        source.transports[1] = source.tcp = TcpSource(
            source.memory, source.reader, source.incarnation, CLUSTER_TOKEN, tls=certificates(folder, "worker")
        )
        old = TcpDestination(CLUSTER_TOKEN, tls=certificates(folder, "store", look_every_s=1e9))
        async with running(source):
            await meet(old, source)
            written(folder)
            await meet(TcpDestination(CLUSTER_TOKEN, tls=certificates(folder, "store")), source)
            with pytest.raises(ProtocolViolation, match="refused"):
                await meet(old, source)


class TestWhomADestinationBelieves:
    async def test_no_source_of_another_ca_or_role(self, tls: Certificates, certified: Path, elsewhere: Path) -> None:
        destination = Destination()
        cases: list[tuple[Certificates, str]] = [
            (certificates(elsewhere, "worker"), "refused: "),
            (certificates(certified, "router"), "refused: its certificate is of spiffe://baton/router"),
            (
                naming(certified, "strange", b"spiffe://baton/worker\xff"),
                "refused: its certificate has names that cannot",
            ),
        ]
        async with running(destination):
            for shown, why in cases:
                server = await asyncio.start_server(_hang_up, "127.0.0.1", 0, ssl=_without_asking(shown))
                async with server:
                    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
                    offer = types_pb2.KVOffer(transport=types_pb2.TRANSPORT_TCP, tcp_address=address, tcp_tls=True)
                    with pytest.raises(ProtocolViolation, match=why):
                        await destination.sockets.connect(types_pb2.KVSource(), offer, FETCH)

    @pytest.mark.parametrize("source_has_it", [True, False])
    async def test_one_that_is_in_clear_and_one_that_is_not_do_not_meet(
        self, certified: Path, monkeypatch: pytest.MonkeyPatch, source_has_it: bool
    ) -> None:
        """Nothing is dialled: else a destination would say in clear what it wants, or a source would."""
        having = certificates(certified, "worker")
        monkeypatch.setattr(kv_harness, "TLS", having if source_has_it else None)
        source = Source()
        monkeypatch.setattr(kv_harness, "TLS", None if source_has_it else having)
        destination = Destination()
        async with running(source, destination):
            lease = source.lease(40, sealed=True)
            why = "it is TLS, and this" if source_has_it else "it is in clear, and this worker's sockets are TLS"
            with pytest.raises(TcpUnavailable, match=why):
                await destination.fetch(source, lease, transport="tcp")
            assert source.tcp.num_connections == 0
            source.table.abort(lease.lease_id, 0.0)

    @pytest.mark.parametrize("make", [TcpDestination, lambda token: TcpSource(None, None, 1, token)])  # type: ignore
    async def test_nobody_is_without_both_token_and_certificate(self, make: Callable[[str], object]) -> None:
        with pytest.raises(ValueError, match="inside TLS only"):
            make("")


def _without_asking(shown: Certificates) -> ssl.SSLContext:
    """Returns a context for who shows a certificate and does not ask for one."""
    context = shown.server_context()
    context.verify_mode = ssl.CERT_NONE
    return context


async def _hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()
