"""Tests docker-compose.yml in a real engine: it comes up, serves, scales, loses no request, and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from services.rpc.authentication import ROUTER
from services.rpc.channels import dial
from tests.support.certificates import certificates
from tests.support.cluster import receive
from tests.support.compose import DEPLOY, TLS_FILE
from tests.support.processes import baton
from tests.support.stack import (
    IMAGE,
    ROUTER_IMAGE,
    UP_WITHIN_S,
    Operator,
    Stack,
    build,
    docker,
    has_compose,
    missing_engine,
    ready,
)

MISSING = missing_engine()
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(MISSING is not None, reason=f"the compose stack was not started: {MISSING}"),
    pytest.mark.timeout(2400),
]
NUM_CLIENTS, MAX_TOKENS = 6, 48
COMMANDS = [["docker", "compose"], ["docker-compose"]]
OTHERS: dict[str, tuple[tuple[Path, ...], dict[str, str]]] = {
    "network": ((), {"COMPOSE_PROFILES": "network"}),
    "tls": ((TLS_FILE,), {"CPU_TRANSPORT": "tcp"}),
}
"""Files and settings of stacks that one command runs: workers that share nothing but a network; TLS everywhere and two
tenants, with KV over sockets, which then need TLS."""


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    build()
    yield IMAGE
    docker("rmi", IMAGE, ROUTER_IMAGE)


@pytest.fixture(scope="module", params=map(" ".join, COMMANDS))
def stack(request: pytest.FixtureRequest, image: str) -> Iterator[Stack]:
    """Yields a stack whose containers are healthy, and leaves nothing of them. The parameter is a compose command or a
    key of `OTHERS`. One fixture has them all, so that one stack has ended before the next starts in its place."""
    files, settings = OTHERS.get(request.param, ((), {}))
    commands = COMMANDS if request.param in OTHERS else [request.param.split()]
    command = next((each for each in commands if has_compose(each)), None)
    if command is None:
        pytest.skip(f"{request.param} is not on this machine")
    stack = Stack(command, *files, **settings)
    try:
        stack.compose("up", "--detach")
        stack.await_healthy(3)
        yield stack
    finally:
        stack.compose("down", "--volumes", "--timeout", "1")
    assert stack.remains() == []


@pytest.mark.parametrize("name", [IMAGE, ROUTER_IMAGE])
def test_an_image_holds_what_is_pinned_and_no_compiler(image: str, name: str) -> None:
    shell = ["run", "--rm", "--network", "none", "--entrypoint", "sh", name, "-c"]
    assert docker(*shell, "id -u").strip() == "10001"
    assert docker(*shell, "for c in gcc cc g++ c++ clang tcc make ld as; do command -v $c; done; true").strip() == ""
    pinned = {_name(line) for line in (DEPLOY.parent / "requirements" / "constraints.txt").read_text().splitlines()}
    installed = {_name(line) for line in docker(*shell, "pip freeze 2>/dev/null").splitlines()}
    assert ("torch" in installed) is ("transformers" in installed) is (name == IMAGE)
    assert installed - pinned == {"baton-serving", "baton-client"}


def test_generate_from_the_host(stack: Stack, tmp_path: Path) -> None:
    flags = ["--target", stack.target, "--raw", "--prompt", "The sea is", "--max-tokens", "8", "--json"]
    process = baton(["generate", *flags], tmp_path)
    assert process.returncode == 0, process.stderr
    answer = json.loads(process.stdout)
    assert answer["usage"]["output_tokens"] == 8
    assert answer["workers"]["prefill"].startswith("prefill-")
    assert answer["workers"]["decode"].startswith("decode-")
    assert answer["timings"]["transport"].lower().endswith("shm")


def test_http_from_the_host(stack: Stack) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.http_port}/v1/models", timeout=30) as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == ["smollm2-135m-instruct"]
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.metrics_port}/metrics", timeout=30) as answer:
        assert b'baton_workers{model="smollm2-135m-instruct",role="decode",state="ready"} 1.0' in answer.read()


def test_shared_memory_crosses_the_containers(stack: Stack) -> None:
    """The log of the decode container says it, and the two namespaces are different ones."""
    log = stack.logs("decode")
    assert re.search(r"KV transport: pulls by shm only, offers shm \(/run/baton/decode-\w+-50051\.sock\)", log)
    assert re.search(r"kv transfer from \S+ goes by shared memory: \d+ blocks at /run/baton/prefill-\w+-50051", log)
    for service in ("prefill", "decode"):
        (container,) = stack.containers(service)
        assert container["HostConfig"]["IpcMode"] in ("private", "")
        assert container["HostConfig"]["PidMode"] == ""


async def test_replicas_come_and_requests_survive_their_end(stack: Stack) -> None:
    """Three decode workers; under load one is stopped (it drains) and one is killed (the engine starts it again)."""
    operator = Operator(*stack.control())
    await asyncio.to_thread(stack.compose, "up", "--detach", "--scale", "decode=3")
    workers = await operator.until(lambda status: len(found := ready(status, "decode")) == 3 and found, "3 decodes")
    assert len({each.worker.address for each in workers}) == 3
    async with _load(stack.target) as load:
        stopped = _container(await operator.until(_busy, "a decode worker is busy"))
        await asyncio.to_thread(docker, "stop", "-t", "120", stopped, timeout_s=180)
        assert json.loads(docker("inspect", stopped))[0]["State"]["ExitCode"] == 0
        await load.another_round()
        killed = await operator.until(_busy, "a decode worker is busy")
        before = load.num_done
        await asyncio.to_thread(docker, "exec", _container(killed), "python", "-c", _KILL)
        await operator.until(lambda status: _has_returned(status, killed.worker), "the killed one is back")
        await load.another_round()
    assert load.num_done > before >= NUM_CLIENTS


@pytest.mark.parametrize("stack", ["network"], indirect=True)
def test_between_containers_that_share_no_memory_kv_goes_by_tcp_and_the_log_says_so(
    stack: Stack, tmp_path: Path
) -> None:
    flags = ["--target", stack.target, "--raw", "--prompt", "The sea is", "--max-tokens", "8", "--json"]
    process = baton(["generate", *flags], tmp_path)
    assert process.returncode == 0, process.stderr
    answer = json.loads(process.stdout)
    assert answer["usage"]["output_tokens"] == 8
    assert answer["timings"]["transport"].lower().endswith("tcp")
    log = stack.logs("decode-net")
    assert re.search(r"kv transfer from \S+ takes another transport: shared memory at @baton-", log)
    assert re.search(r"kv transfer from \S+: a probe says tcp [\d.]+ GB/s, shm 0.00 GB/s; the first is taken", log)


@pytest.mark.parametrize("stack", ["tls"], indirect=True)
async def test_two_tenants_are_served_inside_tls(stack: Stack) -> None:
    authority = stack.read("/run/credentials/ca.pem").encode()
    keys = {name: stack.read(f"/run/credentials/{name}.api-key").strip() for name in ("one", "two")}
    async with grpc.aio.secure_channel(stack.target, grpc.ssl_channel_credentials(authority)) as channel:
        for key in keys.values():
            answer = await _answer(channel, key)
            assert answer.completion.usage.output_tokens == 8
            assert answer.completion.workers.prefill.startswith("prefill-")
            assert answer.completion.workers.decode.startswith("decode-")
            assert answer.completion.timings.transport == types_pb2.TRANSPORT_TCP
        assert await _refusal(channel, "bk_aaaaaaaaaaaa_" + "a" * 43) is grpc.StatusCode.UNAUTHENTICATED
    async with dial(stack.target) as channel:
        assert await _refusal(channel, keys["one"]) is grpc.StatusCode.UNAVAILABLE, "in the clear"
    assert re.search(r"pulls by tcp only, offers tcp \(\S+, TLS\)", stack.logs("decode"))


@pytest.mark.parametrize("stack", ["tls"], indirect=True)
def test_http_from_the_host_inside_tls(stack: Stack) -> None:
    context = ssl.create_default_context(cadata=stack.read("/run/credentials/ca.pem"))
    request = urllib.request.Request(f"https://127.0.0.1:{stack.http_port}/v1/models")
    request.add_header("authorization", f"Bearer {stack.read('/run/credentials/two.api-key').strip()}")
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == ["smollm2-135m-instruct"]


@pytest.mark.parametrize("stack", ["tls"], indirect=True)
async def test_the_control_port_asks_for_an_operators_certificate(stack: Stack, tmp_path: Path) -> None:
    for name in ("operator.pem", "operator.key", "client.pem", "client.key", "ca.pem"):
        path = tmp_path / name
        path.touch(mode=0o600)
        path.write_text(stack.read(f"/run/credentials/{name}"))
    for role, expected in (("operator", grpc.StatusCode.OK), ("client", grpc.StatusCode.UNAUTHENTICATED)):
        shown = certificates(tmp_path, role)
        async with dial(stack.control_address(), None, shown, role=ROUTER) as channel:
            call = control_pb2_grpc.ControlServiceStub(channel).GetStatus(control_pb2.GetStatusRequest(), timeout=30.0)
            assert await call.code() is expected, role


async def _answer(channel: Any, key: str) -> inference_pb2.GenerateResponse:
    request = inference_pb2.GenerateRequest(
        text="Letter: Dear reader, I write to you from the sea, where",
        stopping=types_pb2.StoppingParams(max_tokens=8, ignore_eos=True),
    )
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    answer: inference_pb2.GenerateResponse = await stub.Generate(
        request, timeout=120.0, metadata=(("authorization", f"Bearer {key}"),)
    )
    return answer


async def _refusal(channel: Any, key: str) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await _answer(channel, key)
    return refused.value.code()


# The process under the container's init.
_KILL = (
    "import os, signal, pathlib; "
    "os.kill(next(int(p.name) for p in pathlib.Path('/proc').iterdir() if p.name.isdigit() and p.name != '1' "
    "and b'baton\\0decode' in (p / 'cmdline').read_bytes()), signal.SIGKILL)"
)


@dataclass
class Load:
    num_done: int = 0
    rounds: list[asyncio.Event] = field(default_factory=list)
    over: bool = False

    def done(self) -> None:
        self.num_done += 1
        for waiting in self.rounds:
            waiting.set()

    async def another_round(self) -> None:
        """Waits for as many answers more as there are clients."""
        goal, more = self.num_done + NUM_CLIENTS, asyncio.Event()
        self.rounds.append(more)
        async with asyncio.timeout(UP_WITHIN_S):
            while self.num_done < goal:
                more.clear()
                await more.wait()
        self.rounds.remove(more)


@contextlib.asynccontextmanager
async def _load(target: str) -> AsyncIterator[Load]:
    """Clients that ask again and again; every answer must be whole."""
    load = Load()
    async with dial(target) as channel, asyncio.TaskGroup() as group:
        for number in range(NUM_CLIENTS):
            group.create_task(_ask(channel, load, number))
        yield load
        load.over = True


async def _ask(channel: object, load: Load, number: int) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[arg-type]
    while not load.over:
        request = inference_pb2.GenerateRequest(
            text=f"Letter {number}.{load.num_done}: Dear reader, I write to you from the sea, where",
            sampling=types_pb2.SamplingParams(temperature=0.0),
            stopping=types_pb2.StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
        )
        answer = await receive(stub.GenerateStream(request, timeout=600))
        assert len(answer.token_ids) == MAX_TOKENS
        assert answer.completion is not None
        assert answer.completion.finish_reason == types_pb2.FINISH_REASON_LENGTH
        load.done()


def _busy(status: control_pb2.GetStatusResponse) -> control_pb2.WorkerStatus | None:
    """Returns a decode worker in the middle of its sequences."""
    return next((each for each in ready(status, "decode") if each.load.num_running), None)


def _has_returned(status: control_pb2.GetStatusResponse, worker: control_pb2.WorkerDescription) -> bool:
    """Returns whether a worker is back under its old name, as another process."""
    now = {each.worker.worker_id: each.worker.incarnation for each in ready(status, "decode")}
    return now.get(worker.worker_id, worker.incarnation) != worker.incarnation


def _container(worker: control_pb2.WorkerStatus) -> str:
    return worker.worker.worker_id.split("-")[1]


def _name(requirement: str) -> str:
    return re.split(r"==| @ ", requirement)[0].lower().replace("_", "-")
