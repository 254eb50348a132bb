"""Measures what calls without a valid key cost: the router's processor time for each, beside calls of what is not there
(404; over gRPC, UNIMPLEMENTED), and what callers with a key notice of 10,000 a minute.

Router, workers without an engine, and those who send wrong keys are a process each; who has a key is this one. Wrong
keys come over either front on many connections. What is compared is taken in turns, so that what else the machine does
falls on all; and calls of what is not there have the same key and message, which the runtime reads before it looks for
a method. A server of gRPC that knows no keys, and whose one handler refuses at once, tells what of a refusal is the
runtime's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import psutil
import uvloop

from baton.v1 import inference_pb2
from benchmarks.figure import Figure, Findings
from benchmarks.ports import free_ports
from benchmarks.router_streams.measure import RouterProcess, cpu_s, router_process, until, workers_process
from benchmarks.settings import setting
from services.router.tenants.keys import key_of, new_key
from services.rpc.options import server_options

_LANES = 160
"""Connections of those who send wrong keys."""
_SIZES = {"a key of 7 KB": 7_000, "a key of 60 KB": 60_000, "a key of 1 MB": 1 << 20}
_MOST_GRPC = 8_000
_GENERATE, _NOTHING = "/baton.v1.InferenceService/Generate", "/baton.v1.NoService/Nothing"
_MESSAGE = inference_pb2.GenerateRequest(text="x").SerializeToString()
Send = Callable[[int, str, int], Awaitable[None]]


@dataclasses.dataclass(frozen=True)
class WrongKeySettings:
    wrong_keys_per_min: float = setting(10_000.0, "wrong keys a minute, half of them over each front")
    wrong_keys_window_s: float = setting(10.0, "seconds of each measurement")
    wrong_keys_costed: int = setting(2_000, "wrong keys by which their cost is measured")


def measure(model: str, path: str, repeats: int, settings: WrongKeySettings) -> Findings:
    """Returns the costs and the latencies. `path` is the model's folder."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, key = Path(name), new_key()
        tenants, known = folder / "tenants.yaml", key_of(key)
        entry = {"keys": [{"id": known.key_id, "sha256": known.digest.hex()}]}
        tenants.write_text(json.dumps({"tenants": {"acme": entry}}))
        router = stack.enter_context(router_process(path, folder, f"--tenants={tenants}"))
        stack.enter_context(workers_process(model, path, [router], folder, num_prefill=1, num_decode=1, step_ms=5.0))
        until(router.all_proven, "all pairs are proven", 300.0)
        return [*_latencies(router, key, repeats, settings), *_costs(router, repeats, settings)]


def _latencies(router: RouterProcess, key: str, repeats: int, settings: WrongKeySettings) -> Findings:
    """Takes them alone, beside wrong keys, and beside as many calls of what is not there: senders take processor time
    from all others on a small machine, whatever they send."""
    rate = f"{settings.wrong_keys_per_min:g}"
    ways = {
        "": contextlib.nullcontext,
        f"{rate} wrong keys a minute": functools.partial(_sender, router, settings.wrong_keys_per_min / 60, "keys"),
        f"{rate} calls of what is not there": functools.partial(_sender, router, settings.wrong_keys_per_min / 60, ""),
    }
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    asyncio.run(_asked(router, key, 3.0))  # what is loaded and learned at first
    for _ in range(repeats):
        for way, beside in ways.items():
            with beside():
                taken[way].append(asyncio.run(_asked(router, key, settings.wrong_keys_window_s)))
    alone, keys, nothing = taken.values()
    figures: Findings = []
    for index, name in enumerate(("p50", "p99")):
        figures.append(Figure(f"answers of a tenant, {name}", "ms", tuple(each[index] for each in alone)))
        for way in list(ways)[1:]:
            figures.append(Figure(f"  beside {way}", "ms", tuple(each[index] for each in taken[way])))
        for what, others in (("", alone), (" against what is not there", nothing)):
            grown = tuple(100 * (with_[index] / other[index] - 1) for with_, other in zip(keys, others, strict=True))
            figures.append(Figure(f"  wrong keys add{what}", "%", grown, "<= 10"))
    return figures


async def _asked(router: RouterProcess, key: str, seconds: float) -> tuple[float, float]:
    """Returns median and 99th of 100 of the times of short answers, milliseconds, which two callers ask for."""
    taken: list[float] = []
    until_s = time.monotonic() + seconds
    base = f"http://127.0.0.1:{router.ports['http']}"

    async def ask(http: httpx2.AsyncClient) -> None:
        while time.monotonic() < until_s:
            began_s = time.perf_counter()
            answer = await http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 2})
            answer.raise_for_status()
            taken.append((time.perf_counter() - began_s) * 1000)

    headers = {"authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(base_url=base, headers=headers, trust_env=False) as http:
        await asyncio.gather(ask(http), ask(http))
    return statistics.median(taken), statistics.quantiles(taken, n=100)[98]


@contextlib.contextmanager
def _sender(router: RouterProcess, per_s: float, what: str) -> Iterator[None]:
    """Has wrong keys ("keys") or calls of what is not there ("") sent at that rate by a process of its own."""
    command = [sys.executable, "-m", "benchmarks.wrong_keys", str(router.ports["grpc"]), str(router.ports["http"])]
    with subprocess.Popen([*command, str(per_s), what]) as process:
        time.sleep(2.0)
        try:
            yield
            assert process.poll() is None, "it sends to the end"
        finally:
            process.kill()


def _costs(router: RouterProcess, repeats: int, settings: WrongKeySettings) -> Findings:
    """Takes what is compared with what is not there in turns, then the longer keys."""
    number, nothing_http = settings.wrong_keys_costed, functools.partial(_by_http, path="/nothing")
    nothing_grpc = functools.partial(_by_grpc, method=_NOTHING)
    with _bare_server() as bare:
        ways: dict[str, tuple[RouterProcess, str, Send]] = {
            "what is not there, gRPC": (router, "grpc", nothing_grpc),
            "what is not there, HTTP": (router, "http", nothing_http),
            "a key of the right form, gRPC": (router, "grpc", _by_grpc),
            "a bare handler that refuses, gRPC": (bare, "grpc", _by_grpc),
            "a key of the right form, HTTP": (router, "http", _by_http),
        }
        rounds = [{name: _cost(*way, new_key(), number) for name, way in ways.items()} for _ in range(repeats)]
    figures: Findings = []
    for name in ways:
        figures.append(Figure(f"{name}: CPU", "ms", tuple(each[name] for each in rounds)))
        nothing = f"what is not there, {name[-4:]}"
        if name != nothing:
            of = tuple(each[name] / each[nothing] for each in rounds)
            figures.append(Figure("  of what is not there", "x", of, "" if name.startswith("a bare") else "<= 1"))
    for what, size in _SIZES.items():
        for front, send in (("gRPC", _by_grpc), ("HTTP", _by_http)):
            fewer = number if size < _MOST_GRPC else number // 10
            samples = tuple(_cost(router, front.lower(), send, "x" * size, fewer) for _ in range(repeats))
            figures.append(Figure(f"{what}, {front}: CPU", "ms", samples))
    return figures


@contextlib.contextmanager
def _bare_server() -> Iterator[RouterProcess]:
    """Runs a server of gRPC, with the router's options, that refuses every call of a method it knows."""
    [port] = free_ports(1)
    with subprocess.Popen([sys.executable, "-m", "benchmarks.wrong_keys", "refuse", str(port)]) as process:
        time.sleep(2.0)
        try:
            yield RouterProcess(psutil.Process(process.pid), {"grpc": port})
        finally:
            process.kill()


async def _refuse_for_ever(port: int) -> None:
    async def refuse(requests: Any, context: Any) -> None:
        context.set_code(grpc.StatusCode.UNAUTHENTICATED)

    server = grpc.aio.server(options=server_options())
    service, _, method = _GENERATE.removeprefix("/").partition("/")
    handler = grpc.stream_stream_rpc_method_handler(refuse)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def _cost(router: RouterProcess, front: str, send: Send, key: str, number: int) -> float:
    port = router.ports[front]
    asyncio.run(_in_lanes(functools.partial(send, port, key), _LANES))
    began_s, used_s = time.monotonic(), cpu_s(router)
    asyncio.run(_in_lanes(functools.partial(send, port, key), number))
    used_s, took_s = cpu_s(router) - used_s, time.monotonic() - began_s
    idle_s = cpu_s(router)
    time.sleep(2.0)
    by_itself = (cpu_s(router) - idle_s) / 2.0  # heartbeats and ticks
    return (used_s - by_itself * took_s) / number * 1000


async def _in_lanes(send: Callable[[int], Awaitable[None]], number: int) -> None:
    """Sends so many, over many connections at once."""
    await asyncio.gather(*(send(max(1, number // _LANES)) for _ in range(min(_LANES, number))))


async def _by_grpc(port: int, key: str, number: int, *, method: str = _GENERATE) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call = channel.unary_unary(method)
        for _ in range(number):
            await call(_MESSAGE, metadata=(("authorization", f"Bearer {key}"),)).code()


async def _by_http(port: int, key: str, number: int, *, path: str = "/v1/completions") -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 2\r\n"
    request = f"{head}authorization: Bearer {key}\r\n\r\n{{}}".encode()
    reader = writer = None
    for _ in range(number):
        if writer is None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            writer.write(request)
            await writer.drain()
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
            if b"connection: close" not in answer:
                continue
        writer.close()
        writer = None
    if writer is not None:
        writer.close()


async def _send_for_ever(grpc_port: int, http_port: int, per_s: float, what: str) -> None:
    """Sends half of them over each front, each without waiting for the answers to others."""
    tasks: set[asyncio.Task[None]] = set()
    began_s, key = time.monotonic(), new_key()
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") for _ in range(4)]
    method = _GENERATE if what else _NOTHING
    path = "/v1/completions" if what else "/nothing"
    calls = [channel.unary_unary(method) for channel in channels]

    async def by_grpc(number: int) -> None:
        await calls[number % len(calls)](_MESSAGE, metadata=(("authorization", f"Bearer {key}"),)).code()

    for number in range(10**9):
        due_s = began_s + number / per_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        work = by_grpc(number) if number % 2 else _by_http(http_port, key, 1, path=path)
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    if sys.argv[1] == "refuse":
        uvloop.run(_refuse_for_ever(int(sys.argv[2])))
    asyncio.run(_send_for_ever(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]))
