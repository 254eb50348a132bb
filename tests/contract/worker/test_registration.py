"""Tests how a worker finds its routers: what goes wrong is tried again and told, and its health says whether one has
it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import control_pb2, control_pb2_grpc
from benchmarks.ports import free_ports
from services.core.errors import Unauthenticated, WorkerIdInUse
from services.rpc.serving import GrpcServer
from services.worker import registration
from services.worker.host import WorkerHost
from services.worker.registration import Registrations, pause_s
from tests.support.patience import HANG_S
from tests.support.trusted import CLUSTER_TOKEN, dial
from tests.support.workers import DECODE, running_worker, until, worker_config

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
EVERY = ("baton.v1.WorkerService", "baton.v1.KVTransferService")


class Registry(control_pb2_grpc.RegistryServiceServicer):
    """Is a router's door, with nothing behind it."""

    def __init__(self, port: int = 0) -> None:
        self.num_calls = 0
        self.error: Exception | None = None
        self.server = GrpcServer(port=port, token=CLUSTER_TOKEN)
        self.server.add("baton.v1.RegistryService", control_pb2_grpc.add_RegistryServiceServicer_to_server, self)

    async def Register(self, request: control_pb2.RegisterRequest, context: Any) -> control_pb2.RegisterResponse:
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        return control_pb2.RegisterResponse(router_incarnation=7, interval_ms=20)


@contextlib.asynccontextmanager
async def registry(port: int = 0) -> AsyncIterator[Registry]:
    door = Registry(port)
    await door.server.start()
    try:
        yield door
    finally:
        await door.server.stop()


@contextlib.asynccontextmanager
async def joining(*targets: str) -> AsyncIterator[Registrations]:
    found = Registrations("w", control_pb2.RegisterRequest, dial, lambda: None)
    tasks = [asyncio.create_task(found.join(target)) for target in targets]
    try:
        yield found
        assert not any(task.done() for task in tasks), "a registration ends with its worker"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def told(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


async def health(host: WorkerHost, service: str) -> int:
    async with dial(host.server.address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await health_pb2_grpc.HealthStub(channel).Check(request)).status)


async def becomes(host: WorkerHost, status: int) -> None:
    async with asyncio.timeout(HANG_S):
        while {await health(host, service) for service in EVERY} != {status}:  # noqa: ASYNC110  # only asking tells
            await asyncio.sleep(0.01)
    assert await health(host, "") == SERVING, "the process lives"


async def test_a_port_that_is_no_control_port_is_named(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(running_worker(worker_config(model), DECODE))
        config = worker_config(model, router=(other.address,))
        host = await stack.enter_async_context(running_worker(config, DECODE))
        await until(
            lambda: told(caplog, "is not a router's control port (--control-port, usually 50052)"), "it says so"
        )
        await becomes(host, NOT_SERVING)


async def test_health_says_whether_a_router_has_it(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with contextlib.AsyncExitStack() as first:
        [port] = free_ports(1)
        door = await first.enter_async_context(registry(port))
        door.error = WorkerIdInUse("another process is worker 'w'\x1b[2J")
        async with running_worker(worker_config(model, router=(door.server.address,)), DECODE) as host:
            await until(lambda: door.num_calls >= 3, "it asks again and again")
            await becomes(host, NOT_SERVING)
            assert told(caplog, r"refuses this worker: ALREADY_EXISTS another process is worker 'w'\x1b[2J") == 1
            door.error = None
            await becomes(host, SERVING)
            await first.aclose()
            await becomes(host, NOT_SERVING)
            await until(lambda: told(caplog, f"router {door.server.address} lost: UNAVAILABLE") == 1, "it says so")
            async with registry(port):
                await becomes(host, SERVING)
                assert told(caplog, "joined router") == 2


async def test_a_refused_token_says_which_settings_give_it(caplog: pytest.LogCaptureFixture) -> None:
    async with registry() as door:
        door.error = Unauthenticated("it needs the cluster token")
        async with joining(door.server.address):
            await until(lambda: door.num_calls >= 1, "it asks")
            await until(
                lambda: told(caplog, "UNAUTHENTICATED it needs the cluster token; --cluster-token-file") == 1, "told"
            )
    assert told(caplog, "BATON_CLUSTER_TOKEN") == 1


async def test_a_worker_without_routers_serves(model: Path) -> None:
    async with running_worker(worker_config(model), DECODE) as host:
        await becomes(host, SERVING)


async def test_a_name_joins_all_its_addresses_and_may_stop_resolving(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "_RESOLVE_EVERY_S", 0.01)
    names: dict[str, list[str]] = {"routers": ["127.0.0.1", "127.0.0.2"]}
    num_asked = 0

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        nonlocal num_asked
        num_asked += 1
        if host not in names:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in names[host]]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with registry() as door, joining(f"routers:{door.server.port}") as found:
        await until(lambda: found.num_joined == 1, "the one that is there is joined")
        second = GrpcServer("127.0.0.2", door.server.port, token=CLUSTER_TOKEN)
        second.add("baton.v1.RegistryService", control_pb2_grpc.add_RegistryServiceServicer_to_server, door)
        await second.start()
        await until(lambda: found.num_joined == 2, "and the other when it comes")
        addresses = names.pop("routers")
        asked = num_asked
        await until(lambda: num_asked > asked + 3, "it is looked up again")
        assert found.num_joined == 2, "no answer of the name server's is no reason to leave"
        assert told(caplog, "its name cannot be resolved: Name or service not known") == 1
        names["routers"] = addresses[:1]
        await until(lambda: found.num_joined == 1, "an address that is gone is left")
        assert told(caplog, "its name resolves again") == 1
        await second.stop()


@pytest.mark.parametrize("target", ["router", "router:0", "router:70000", "a..b:50052", "x" * 64 + ":50052"])
async def test_what_cannot_be_a_router_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    """Flags refuse it at the start; here it stands beside one that is joined."""
    monkeypatch.setattr(registration, "_RESOLVE_EVERY_S", 0.01)
    async with registry() as door, joining(target, door.server.address) as found:
        await until(lambda: found.num_joined == 1 and door.num_calls > 3, "the other is joined")
        assert told(caplog, f"router {target}: its name cannot be resolved") == 1


async def test_a_defect_is_told_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    num_calls = 0

    def request() -> control_pb2.RegisterRequest:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 3:
            raise RuntimeError("a defect")
        return control_pb2.RegisterRequest()

    async with registry() as door:
        found = Registrations("w", request, dial, lambda: None)
        task = asyncio.create_task(found.join(door.server.address))
        await until(lambda: found.num_joined == 1, "joined in the end")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert told(caplog, "refuses this worker: INTERNAL RuntimeError") + told(caplog, "attempt to register failed") >= 2
    assert found.num_joined == 0


def test_pauses_grow_to_a_bound_and_differ() -> None:
    pauses = [pause_s(number, "w 127.0.0.1:1") for number in range(1, 30)]
    assert 0.18 <= pauses[0] <= 0.32
    assert all(1.5 <= pause <= 2.5 for pause in pauses[5:])
    assert len({round(pause_s(5, f"w{number} r"), 6) for number in range(100)}) > 90


async def test_a_worker_without_a_router_says_once_what_is_missing(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_worker(worker_config(model), DECODE):
        assert told(caplog, "knows no router") == 1
        assert told(caplog, "--router HOST:PORT") == 1
    caplog.clear()
    async with registry() as door, running_worker(worker_config(model, router=(door.server.address,)), DECODE):
        assert told(caplog, "knows no router") == 0
