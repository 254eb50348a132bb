"""Tests gRPC inside TLS: whom a server lets in, whom a channel takes for whom, and new certificates without a
restart."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from cryptography import x509
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.certs import make_certificates
from services.rpc import options, serving
from services.rpc.authentication import OPERATOR, ROUTER, STORE, WORKER, allowed_callers, role_of
from services.rpc.certificates import Certificates
from services.rpc.channels import dial
from tests.support.certificates import certificates, naming, written
from tests.support.kv_harness import until
from tests.support.patience import HANG_S

Code = grpc.StatusCode
_ALL = ("unary_unary", "unary_stream", "writes", "stream_unary", "stream_stream")


class Kinds:
    """Answers every kind of RPC with what it was sent, under the name of a service that only routers may call."""

    def register(self, _servicer: object, server: grpc.aio.Server) -> None:
        make: dict[str, Any] = {
            "unary_unary": grpc.unary_unary_rpc_method_handler,
            "unary_stream": grpc.unary_stream_rpc_method_handler,
            "writes": grpc.unary_stream_rpc_method_handler,
            "stream_unary": grpc.stream_unary_rpc_method_handler,
            "stream_stream": grpc.stream_stream_rpc_method_handler,
        }
        form = status_pb2.Status.FromString, status_pb2.Status.SerializeToString
        handlers = {name: kind(getattr(self, name), *form) for name, kind in make.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.v1.WorkerService", handlers),))

    async def unary_unary(self, request: Any, context: Any) -> Any:
        return request

    async def unary_stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield request

    async def writes(self, request: Any, context: Any) -> None:
        await context.write(request)

    async def stream_unary(self, requests: Any, context: Any) -> Any:
        return [each async for each in requests][-1]

    async def stream_stream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield request


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "tls")


@contextlib.asynccontextmanager
async def _serving(shown: Certificates, **access: Any) -> AsyncIterator[str]:
    server = serving.GrpcServer(certificates=shown, **access)
    server.add("baton.v1.WorkerService", Kinds().register, None)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


def _num_accepted(address: str) -> int:
    """Returns how many connections the server at the address, which is in this process, has."""
    port = int(address.rpartition(":")[2])
    connections = psutil.Process().net_connections(kind="tcp")
    return sum(each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED for each in connections)


def _call(channel: grpc.aio.Channel, name: str, *words: Any) -> Any:
    return channel.stream_stream(f"/baton.v1.WorkerService/{name}")(*words, timeout=HANG_S)


async def _ask(channel: grpc.aio.Channel, name: str = "unary_unary") -> str:
    """Returns what comes back of a call that sends one word. Raises AioRpcError."""
    word = status_pb2.Status(message="word").SerializeToString()
    answers = [status_pb2.Status.FromString(each).message async for each in _call(channel, name, iter([word]))]
    return ",".join(answers)


async def _code(channel: grpc.aio.Channel, name: str = "unary_unary") -> grpc.StatusCode:
    """Returns the status of a call that sends nothing: where a message meets the end of its call, grpc.aio reports
    that in place of the status (grpc/grpc#36066)."""
    code: grpc.StatusCode = await _call(channel, name).code()
    return code


@pytest.mark.parametrize("name", _ALL)
async def test_a_role_opens_every_kind_of_call_and_another_none(folder: Path, name: str) -> None:
    async with _serving(certificates(folder, "worker"), by_role=True) as address:
        async with dial(address, None, certificates(folder, "router"), role=WORKER) as channel:
            assert await _ask(channel, name) == "word"
        for role in ("worker", "store", "operator", "client"):
            async with dial(address, "any-token-of-sixteen", certificates(folder, role), role=WORKER) as channel:
                assert await _code(channel, name) is Code.UNAUTHENTICATED


async def test_nothing_is_read_of_what_another_role_sends(folder: Path) -> None:
    async with _serving(certificates(folder, "worker"), by_role=True) as address:
        async with dial(address, None, certificates(folder, "client"), role=WORKER) as channel:
            for name in _ALL:
                assert await _code(channel, name) is Code.UNAUTHENTICATED, "it waits for no message"


async def test_both_are_asked_for_where_both_are_to_be_shown(folder: Path) -> None:
    token = "a-token-of-the-tests"
    async with _serving(certificates(folder, "worker"), by_role=True, token=token) as address:
        for role, given, expected in (("router", None, False), ("client", token, False), ("router", token, True)):
            async with dial(address, given, certificates(folder, role), role=WORKER) as channel:
                if expected:
                    assert await _ask(channel) == "word"
                else:
                    assert await _code(channel) is Code.UNAUTHENTICATED


async def test_without_a_certificate_of_the_ca_there_is_no_connection(folder: Path, tmp_path: Path) -> None:
    async with _serving(certificates(folder, "worker"), by_role=True) as address:
        only_ca = Certificates(ca=str(folder / "ca.pem"))
        stranger = certificates(written(tmp_path / "other"), "router")
        for held in (None, only_ca, stranger):
            async with dial(address, None, held) as channel:
                assert await _code(channel) is Code.UNAVAILABLE
        async with dial(address, None, certificates(folder, "router"), role=WORKER) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1


async def test_who_dials_knows_the_role_of_who_answers(folder: Path) -> None:
    """A worker cannot pass for a router, nor can a client, whose certificate is none of a server."""
    router = certificates(folder, "router")
    async with _serving(certificates(folder, "worker"), by_role=True) as address:
        async with dial(address, None, router, role=ROUTER) as channel:
            assert await _code(channel) is Code.UNAVAILABLE
        async with dial(address, None, router) as channel:
            assert await _ask(channel) == "word", "by its host"
    async with _serving(certificates(folder, "store"), by_role=True) as address:
        async with dial(address, None, router, role=WORKER) as channel:
            assert await _ask(channel) == "word", "a store is reached as workers are"
    async with _serving(certificates(folder, "client"), by_role=True) as address:
        for role in (ROUTER, WORKER, ""):
            async with dial(address, None, router, role=role) as channel:
                assert await _code(channel) is Code.UNAVAILABLE


def _serial_at(address: str, folder: Path) -> int:
    """Returns the serial number that a server of gRPC shows to whoever connects now."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(folder / "ca.pem")
    context.load_cert_chain(folder / "router.pem", folder / "router.key")
    context.set_alpn_protocols(["h2"])
    plain = socket.create_connection((host, int(port)), 10)
    with context.wrap_socket(plain, server_hostname=host) as tls:
        return x509.load_der_x509_certificate(tls.getpeercert(binary_form=True)).serial_number


async def test_a_role_is_enough_at_an_address_that_the_certificate_does_not_name(folder: Path) -> None:
    """As the addresses of workers on other hosts, and in containers, are."""
    shown = certificates(folder, WORKER)
    async with _serving(shown, by_role=True, host="127.0.0.2") as address:
        async with dial(address, certificates=certificates(folder, ROUTER), role=WORKER) as channel:
            assert await _ask(channel)
        async with dial(address, certificates=certificates(folder, ROUTER)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await _ask(channel)
            assert refused.value.code() == Code.UNAVAILABLE


async def test_new_certificates_are_shown_to_newcomers_and_open_streams_go_on(folder: Path) -> None:
    held = certificates(folder, "worker")
    router = certificates(folder, "router")
    async with _serving(held, by_role=True) as address, dial(address, None, router, role=WORKER) as channel:
        stream = channel.stream_stream("/baton.v1.WorkerService/stream_stream")()
        await stream.write(b"")
        assert await stream.read() == b""
        before = await asyncio.to_thread(_serial_at, address, folder)
        assert before == held.serial
        written(folder, make_certificates())  # of another CA
        assert await asyncio.to_thread(_serial_at, address, folder) == held.serial != before
        await stream.write(b"")
        assert await stream.read() == b"", "the stream goes on"
        # Whoever dials has read the new ones too: the same channel makes its next call by them.
        assert await _ask(channel) == "word"
        await stream.done_writing()


async def test_channels_of_replaced_certificates_are_closed_with_their_last_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "MAX_CONNECTION_IDLE_MS", int(10_000 * HANG_S))  # the server closes none by itself
    async with _serving(certificates(folder, "worker"), by_role=True) as address:
        async with dial(address, None, certificates(folder, "router"), role=WORKER) as channel:
            stub = channel.stream_stream("/baton.v1.WorkerService/stream_stream")
            stream = stub()
            await stream.write(b"")
            assert await stream.read() == b""
            for _ in range(10):
                written(folder, make_certificates())
                assert await _ask(channel) == "word"
            await until(lambda: _num_accepted(address) == 2)  # the stream's and the newest
            await stream.write(b"")
            assert await stream.read() == b"", "the stream goes on"
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
            del stream  # a call that is kept keeps its connection, also when it has ended
            await until(lambda: _num_accepted(address) == 1)
            newer = stub()  # a stub is not bound to the channel that it was made of
            await newer.write(b"")
            assert await newer.read() == b""
            newer.cancel()


async def test_a_broken_file_changes_nothing_for_anybody(folder: Path) -> None:
    async with _serving(certificates(folder, "worker"), by_role=True) as address:
        before = await asyncio.to_thread(_serial_at, address, folder)
        (folder / "worker.pem").write_bytes(b"-----BEGIN CERTIFICATE-----\nbroken")
        assert await asyncio.to_thread(_serial_at, address, folder) == before


async def test_a_handshake_that_is_never_ended_holds_up_nobody(folder: Path) -> None:
    async with _serving(certificates(folder, "worker"), by_role=True) as address:
        host, _, port = address.rpartition(":")
        with contextlib.ExitStack() as stack:
            for begun in (b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n") * 10:
                silent = stack.enter_context(socket.create_connection((host, int(port))))
                silent.sendall(begun)
            async with dial(address, None, certificates(folder, "router"), role=WORKER) as channel:
                assert await _ask(channel) == "word"


@pytest.mark.parametrize(
    ("ids", "role"),
    [
        ([b"spiffe://baton/router"], "router"),
        ([], ""),
        ([b"spiffe://baton/router", b"spiffe://baton/operator"], ""),
        ([b"spiffe://elsewhere/router"], ""),
        ([b"spiffe://baton.example/router"], ""),
        ([b"spiffe://baton/a/router"], "a/router"),
        ([b"spiffe://baton/router\0.example"], "router\0.example"),
        ([b"\xff"], ""),
    ],
)
def test_which_role_a_certificate_names(folder: Path, ids: list[bytes], role: str) -> None:
    naming(folder, "named", *ids)
    assert role_of({"x509_pem_cert": [(folder / "named.pem").read_bytes()]}) == role


def test_no_certificate_names_no_role() -> None:
    assert role_of({}) == role_of({"x509_pem_cert": [b"none"]}) == ""


@pytest.mark.parametrize("end", [b"\0", b"\0.example", b"\xff", b"\n"])
async def test_a_name_that_only_begins_with_a_role_opens_nothing(folder: Path, end: bytes) -> None:
    shown = naming(folder, "named", b"spiffe://baton/router" + end)
    async with _serving(certificates(folder, "worker"), by_role=True) as address:
        async with dial(address, None, shown, role=WORKER) as channel:
            assert await _code(channel) == Code.UNAUTHENTICATED


def test_a_service_that_is_not_named_is_for_nobody() -> None:
    assert allowed_callers("/baton.v1.NewService/Call") == frozenset()
    assert allowed_callers("/baton.v1.ControlService/Drain") == {OPERATOR}
    assert allowed_callers("/baton.v1.ControlService/GetStatus") == {OPERATOR, STORE}
