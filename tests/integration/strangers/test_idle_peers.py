"""Peers that connect and then say nothing, half of something, or nonsense: nobody else feels it, and health answers.

The process that is attacked has few file descriptors, so that a few hundred peers would be enough to fill it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx2
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from benchmarks.ports import free_ports
from tests.support.bad_peers import HTTP2_PREFACE, HTTP2_SETTINGS
from tests.support.cluster import greedy_request, receive
from tests.support.models import tiny_model
from tests.support.patience import HANG_S, Patience
from tests.support.processes import BATON, environment
from tests.support.trusted import dial
from tests.support.workers import DECODE, PREFILL, running_worker, worker_config

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.process]

NUM_DESCRIPTORS = 256
NUM_PEERS = 400
NUM_CLIENTS = 80
"""More than a gRPC server with so few descriptors accepts connections."""
NEWCOMER_WITHIN_S = 60.0
HEALTH_WITHIN_S = 5.0
PROMPT = list(range(10, 40))
NUM_TOKENS = 200


@dataclass
class Attacked:
    """Runs a router in a process of its own, with its workers here."""

    pid: int
    grpc_port: int
    control_port: int
    http_port: int
    metrics_port: int
    expected: list[int]
    channel: grpc.aio.Channel

    async def stream(self) -> list[int]:
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        return (await receive(stub.GenerateStream(greedy_request(PROMPT, NUM_TOKENS), timeout=60))).token_ids

    async def is_live(self, path: str = "/health/live") -> bool:
        """Asked as an orchestrator does: on a new connection, and not for long."""
        base = f"http://127.0.0.1:{self.http_port}"
        async with httpx2.AsyncClient(base_url=base, timeout=HEALTH_WITHIN_S, trust_env=False) as client:
            answer = await client.get(path)
        return answer.status_code == 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Attacked]:
    folder = tmp_path_factory.mktemp("idle-peers")
    model = tiny_model("llama", folder)
    grpc_port, control_port, http_port, metrics_port = free_ports(4)
    flags = ["--model", str(model), "--port", str(grpc_port), "--http-port", str(http_port)]
    flags += ["--metrics-port", str(metrics_port), "--control-port", str(control_port)]
    command = " ".join([f"ulimit -n {NUM_DESCRIPTORS}; exec", *BATON, "router", *flags])
    log = folder / "log"
    process = await asyncio.create_subprocess_shell(f"{command} >{log} 2>&1", env=environment(folder))
    try:
        config = worker_config(model, router=(f"127.0.0.1:{control_port}",))
        async with (
            running_worker(config, PREFILL),
            running_worker(config, DECODE),
            dial(f"127.0.0.1:{grpc_port}") as channel,
        ):
            async with asyncio.timeout(300), dial(f"127.0.0.1:{control_port}") as control:
                await ready(control)
            known = Attacked(process.pid, grpc_port, control_port, http_port, metrics_port, [], channel)
            known.expected = await known.stream()
            assert len(known.expected) == NUM_TOKENS
            yield known
            process.send_signal(signal.SIGTERM)
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        print(log.read_text()[-2000:])


@pytest_asyncio.fixture(loop_scope="module")
async def attacked(shared: Attacked) -> Attacked:
    """Returns the router with its client connected, before any of a test's peers come: a server closes a connection
    that has been idle, and what was left by the test before may have kept it busy for longer than that."""
    stub = inference_pb2_grpc.InferenceServiceStub(shared.channel)
    await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=NEWCOMER_WITHIN_S, wait_for_ready=True)
    return shared


async def ready(channel: grpc.aio.Channel) -> None:
    stub = control_pb2_grpc.ControlServiceStub(channel)
    while not (await stub.GetStatus(control_pb2.GetStatusRequest(), wait_for_ready=True)).ready:  # noqa: ASYNC110
        await asyncio.sleep(0.05)  # the condition is an RPC: only asking tells


@contextlib.contextmanager
def peers(port: int, count: int, greeting: Callable[[int], bytes]) -> Iterator[list[socket.socket]]:
    """Yields as many connections as the other end lets there be; some of them it closes at once."""
    with contextlib.ExitStack() as stack:
        opened = []
        for number in range(count):
            peer = stack.enter_context(socket.socket())
            peer.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                peer.connect(("127.0.0.1", port))
            opened.append(peer)
            with contextlib.suppress(OSError):
                peer.setblocking(True)
                peer.settimeout(0.5)
                peer.sendall(greeting(number))
        yield opened


def drip(peers: list[socket.socket], byte: bytes) -> None:
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.sendall(byte)


POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
OVER_HTTP: dict[str, tuple[bytes, bytes]] = {
    "nothing": (b"", b""),
    "half a header": (POST + b"x-more: ", b"x"),
    "a body in drips": (POST + b"content-length: 1000\r\n\r\n{", b" "),
    "chunks in drips": (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"1\r\n \r\n"),
    "a body nobody reads": (b"GET /health/live HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999\r\n\r\n", b" "),
    "kept alive": (b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", b""),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)), b"\x00"),
    "HTTP/2": (HTTP2_PREFACE + HTTP2_SETTINGS, b"\x00"),
}
OVER_GRPC: dict[str, tuple[bytes, bytes]] = {
    "nothing": (b"", b""),
    "half a preface": (HTTP2_PREFACE[:10], b""),
    "only the preface": (HTTP2_PREFACE, b""),
    "only settings": (HTTP2_PREFACE + HTTP2_SETTINGS, b""),
    "a frame in drips": (HTTP2_PREFACE + HTTP2_SETTINGS + b"\x00\x40\x00\x00\x00\x00\x00\x00\x01", b"x"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)), b"\x00"),
}


@pytest.mark.parametrize("what", OVER_HTTP)
async def test_idle_http_peers(attacked: Attacked, what: str) -> None:
    greeting, more = OVER_HTTP[what]
    with peers(attacked.http_port, NUM_PEERS, lambda number: greeting) as idle:
        stream = asyncio.create_task(attacked.stream())
        for _ in range(5):
            drip(idle, more)
            assert await attacked.is_live()
            assert await attacked.is_live("/health")
        assert await stream == attacked.expected
        async with httpx2.AsyncClient(trust_env=False, timeout=30) as client:
            asked = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
            answer = await client.post(f"http://127.0.0.1:{attacked.http_port}/v1/completions", json=asked)
        assert answer.status_code == 200


TEN_SECONDS_EACH = {"half a preface", "only the preface", "only settings", "a frame in drips"}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.long] * (what in TEN_SECONDS_EACH)) for what in OVER_GRPC]
)
async def test_idle_grpc_peers(attacked: Attacked, what: str) -> None:
    """Who is connected goes on, and the process accepts on its other ports, those of workers and operators too. Who
    comes new to this one waits until the idle ones are thrown out, since gRPC has no other order."""
    greeting, more = OVER_GRPC[what]
    with peers(attacked.grpc_port, NUM_PEERS, lambda number: greeting) as idle:
        await unharmed(attacked, lambda: drip(idle, more))
        async with asyncio.timeout(NEWCOMER_WITHIN_S):
            await newcomer(attacked.grpc_port)


async def only_connected(channel: grpc.aio.Channel) -> None:
    await channel.channel_ready()
    await asyncio.Event().wait()


async def watching(channel: grpc.aio.Channel) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
    async for _ in watch:
        pass


async def sending_no_request(channel: grpc.aio.Channel) -> None:
    await channel.stream_unary("/baton.v1.InferenceService/ListModels")(wait_for_ready=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("port", "do"),
    [
        ("grpc_port", only_connected),
        ("grpc_port", watching),
        ("grpc_port", sending_no_request),
        ("control_port", watching),
    ],
)
async def test_idle_grpc_clients(attacked: Attacked, port: str, do: Callable[[grpc.aio.Channel], Any]) -> None:
    """These peers answer pings, as gRPC's own clients do, so that only what they hold tells that they are idle."""
    number = getattr(attacked, port)
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(NUM_CLIENTS):
            channel = await stack.enter_async_context(dial(f"127.0.0.1:{number}"))
            clients.append(asyncio.create_task(do(channel)))
        try:
            await unharmed(attacked, lambda: None, control=port != "control_port")
            async with asyncio.timeout(NEWCOMER_WITHIN_S):
                await newcomer(number)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def unharmed(attacked: Attacked, attack: Callable[[], None], *, control: bool = True) -> None:
    stream = asyncio.create_task(attacked.stream())
    for _ in range(3):
        attack()
        assert await attacked.is_live()
        assert await attacked.is_live("/health")
        if control:
            await newcomer(attacked.control_port)
    assert await stream == attacked.expected
    assert num_open_files(attacked) < NUM_DESCRIPTORS - 50


async def newcomer(port: int) -> None:
    """Tries until it is let in."""
    refused = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
    code = grpc.StatusCode.UNAVAILABLE
    patience = Patience(HANG_S)
    while code in refused:
        assert not patience.is_over(), code
        async with dial(f"127.0.0.1:{port}") as channel:
            code = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2).code()
    assert code is grpc.StatusCode.OK


async def test_idle_peers_of_the_metrics_port(attacked: Attacked) -> None:
    with peers(attacked.metrics_port, NUM_PEERS, lambda number: b"GET /metrics" if number % 2 else b""):
        assert await attacked.is_live()
        async with httpx2.AsyncClient(trust_env=False, timeout=10) as client:
            answer = await client.get(f"http://127.0.0.1:{attacked.metrics_port}/metrics")
        assert answer.status_code == 200
        assert "baton_ready" in answer.text
        assert num_threads(attacked) < 120


def num_open_files(attacked: Attacked) -> int:
    return len(os.listdir(f"/proc/{attacked.pid}/fd"))


def num_threads(attacked: Attacked) -> int:
    return len(os.listdir(f"/proc/{attacked.pid}/task"))
