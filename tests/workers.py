"""Workers in this process, on port 0, and a scripted router that speaks their sessions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
from opentelemetry.sdk.trace import TracerProvider

from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from services.decode.servicer import DecodeServicer
from services.engine.engine import Engine
from services.prefill.servicer import PrefillServicer
from services.rpc.channels import dial
from services.rpc.serving import GrpcServer
from services.rpc.telemetry import Tracer
from services.worker.config import WorkerConfig
from services.worker.host import WorkerHost
from services.worker.main import engine_config

PREFILL, DECODE, MIXED = (
    types_pb2.WORKER_ROLE_PREFILL,
    types_pb2.WORKER_ROLE_DECODE,
    types_pb2.WORKER_ROLE_MIXED,
)
IDLE_WITHIN_S = 5.0


def worker_config(model: Path, **changes: Any) -> WorkerConfig:
    config = WorkerConfig(model=str(model), dtype="float32", kv_blocks=128, max_num_batched_tokens=64, threads=1)
    return dataclasses.replace(config, **changes)


@contextlib.contextmanager
def pools_that_cannot_be_mapped() -> Iterator[None]:
    """As on a GPU, whose memory has no descriptor: engines loaded here have none for their pools."""
    load = Engine.__init__

    def load_without(self: Engine, *args: Any, **options: Any) -> None:
        load(self, *args, **options)
        self.cache.close()

    with mock.patch.object(Engine, "__init__", load_without):
        yield


@contextlib.asynccontextmanager
async def running_worker(
    config: WorkerConfig, role: types_pb2.WorkerRole, tracer: Tracer | None = None
) -> AsyncIterator[WorkerHost]:
    """A worker that serves; asserts that it is idle when the block ends without an error."""
    server = GrpcServer(config.host, config.port)
    await server.start()
    engine = await asyncio.to_thread(Engine, engine_config(config, role))
    host = WorkerHost(config, role, engine, server, tracer or Tracer(TracerProvider(shutdown_on_exit=False)))
    phases: list[Any] = []
    if role in (PREFILL, MIXED):
        phases.append(PrefillServicer(host))
    if role in (DECODE, MIXED):
        phases.append(DecodeServicer(host))
    await host.start(phases)
    try:
        yield host
        await idle(host)
    finally:
        await host.stop()


async def until(
    condition: Callable[[], bool], what: str, timeout_s: float = IDLE_WITHIN_S, pause_s: float = 0.005
) -> None:
    """Looks again and again, since what is waited for happens in other threads and processes.

    With a pause of 0, at every turn of the event loop: for what lasts only a few of them.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(pause_s)


async def idle(host: WorkerHost) -> None:
    """Nothing is held: no leg, lease, import, sequence or block reference, and every count agrees."""

    def quiet() -> bool:
        stats = host.engine.stats()
        busy = host.num_legs or len(host.leases) or len(host.imports) or len(host.hub)
        return not busy and stats.ledger.idle and not stats.num_running and not stats.num_waiting

    await until(quiet, f"{host.worker_id} idle: {host.engine.stats()}, {host.num_legs} legs, {len(host.leases)} leases")
    with host.engine.lock:
        host.engine.scheduler.check_idle()
    assert host.engine.alive, "the step thread lives"


class ScriptedRouter:
    """One session of each phase with each worker it opens; events collected in order."""

    def __init__(self, incarnation: int = 99) -> None:
        self.incarnation = incarnation
        self._legs = 0

    def new_leg(self) -> int:
        self._legs += 1
        return self._legs

    def hello(self, host: WorkerHost, number: int = 1) -> types_pb2.SessionHello:
        return types_pb2.SessionHello(
            router_incarnation=self.incarnation, session_number=number, worker_incarnation=host.incarnation
        )

    @contextlib.asynccontextmanager
    async def prefill(self, host: WorkerHost, number: int = 1) -> AsyncIterator[ScriptedSession]:
        request = prefill_pb2.PrefillServiceSessionRequest
        async with _session(host, prefill_pb2_grpc.PrefillServiceStub, request, self.hello(host, number)) as session:
            yield session

    @contextlib.asynccontextmanager
    async def decode(self, host: WorkerHost, number: int = 1) -> AsyncIterator[ScriptedSession]:
        request = decode_pb2.DecodeServiceSessionRequest
        async with _session(host, decode_pb2_grpc.DecodeServiceStub, request, self.hello(host, number)) as session:
            yield session


class ScriptedSession:
    def __init__(self, call: Any, request_type: Any) -> None:
        self.call = call
        self.events: list[Any] = []
        self.loads: list[types_pb2.LoadSnapshot] = []
        self.error: grpc.aio.AioRpcError | None = None
        self._request_type = request_type
        self._arrived = asyncio.Event()
        self._writing = asyncio.Lock()

    async def send(self, **message: Any) -> None:
        async with self._writing:
            await self.call.write(self._request_type(**message))

    async def beat(self) -> None:
        """As a router does, until the session is over."""
        while not self.call.done():
            await self.send(heartbeat=types_pb2.RouterHeartbeat())
            await asyncio.sleep(0.5)

    async def next(self, kind: str, leg: int) -> Any:
        """The first event of this kind for the leg, whatever else came before; it is taken out."""
        async with asyncio.timeout(20):
            while True:
                for event in self.events:
                    if event.WhichOneof("event") == kind and getattr(event, kind).leg == leg:
                        self.events.remove(event)
                        return getattr(event, kind)
                assert self.error is None, f"session ended: {self.error}"
                self._arrived.clear()
                await self._arrived.wait()

    async def tokens(self, leg: int, count: int | None = None) -> tuple[list[int], Any]:
        """Token ids up to the finish (or `count` of them), checked for position, and the finish."""
        ids: list[int] = []
        base: int | None = None
        while True:
            tokens = await self.next("tokens", leg)
            base = tokens.position if base is None else base
            assert tokens.position == base + len(ids), "positions have no gap"
            ids += tokens.token_ids
            if tokens.HasField("finish"):
                return ids, tokens.finish
            if count is not None and len(ids) >= count:
                return ids, None

    async def read(self) -> None:
        try:
            async for response in self.call:
                self.events.extend(response.events)
                self.loads.append(response.load)
                self._arrived.set()
        except grpc.aio.AioRpcError as error:
            self.error = error
            self._arrived.set()


@contextlib.asynccontextmanager
async def _session(host: WorkerHost, stub: Any, request_type: Any, hello: Any) -> AsyncIterator[ScriptedSession]:
    async with dial(host.address) as channel:
        session = ScriptedSession(stub(channel).Session(), request_type)
        reader = asyncio.create_task(session.read())
        await session.send(hello=hello)
        heart = asyncio.create_task(session.beat())
        try:
            yield session
        finally:
            heart.cancel()
            session.call.cancel()
            await asyncio.wait([reader, heart])
