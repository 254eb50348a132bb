"""Runs workers in this process, on port 0, and a scripted router that speaks their sessions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from unittest import mock

import grpc
from opentelemetry.sdk.trace import TracerProvider

from baton.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from services.core.clock import Clock
from services.decode.leg import DecodePhase
from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.loading import torch_engine
from services.engine.worker_engine import WorkerEngine
from services.prefill.leg import PrefillPhase
from services.rpc.telemetry import Tracer
from services.worker.config import WorkerConfig
from services.worker.host import WorkerHost
from services.worker.life import listen
from services.worker.machine import Machine
from services.worker.main import engine_config
from services.worker.metrics import WorkerMetrics
from services.worker.phase import WorkerPhase, role_name
from tests.support.patience import HANG_S, Patience
from tests.support.trusted import cluster_token_of, dial

Roles = dict[types_pb2.WorkerRole, Callable[[WorkerHost], WorkerPhase]]
"""What a worker is made of: its phases, by its roles."""
LoadEngine = Callable[[EngineConfig], WorkerEngine]
PREFILL: Roles = {types_pb2.WORKER_ROLE_PREFILL: PrefillPhase}
DECODE: Roles = {types_pb2.WORKER_ROLE_DECODE: DecodePhase}
MIXED: Roles = {**PREFILL, **DECODE}
PROMPT = [5 + i % 300 for i in range(100)]
GREEDY = types_pb2.SamplingParams(temperature=0.0)


def worker_config(model: Path, /, **changes: Any) -> WorkerConfig:
    config = WorkerConfig(model=str(model), dtype="float32", kv_blocks=128, max_num_batched_tokens=64, threads=1)
    return dataclasses.replace(config, **changes)


@contextlib.contextmanager
def pools_that_cannot_be_mapped() -> Iterator[None]:
    """Makes pools like those on a GPU, whose memory has no descriptor: engines loaded here have none for theirs."""
    load = Engine.__init__

    def load_without(self: Engine, *args: Any, **options: Any) -> None:
        load(self, *args, **options)
        self.cache.close()

    with mock.patch.object(Engine, "__init__", load_without):
        yield


@contextlib.asynccontextmanager
async def running_worker(
    config: WorkerConfig,
    roles: Roles,
    tracer: Tracer | None = None,
    load: LoadEngine = torch_engine,
    *,
    clock: Clock | None = None,
) -> AsyncIterator[WorkerHost]:
    """Yields a worker that serves; asserts that it is idle when the block ends without an error."""
    token, certificates = cluster_token_of(config), config.certificates()
    server = await listen(config, config.port, token, certificates)
    engine = await asyncio.to_thread(load, engine_config(config, roles))
    tracer = tracer or Tracer(TracerProvider(shutdown_on_exit=False))
    host = WorkerHost(config, roles, engine, server, tracer, Machine(token, clock, certificates=certificates))
    await host.start()
    try:
        yield host
        await idle(host)
    finally:
        await host.stop()


def worker_metrics(host: WorkerHost, clock: Clock | None = None) -> WorkerMetrics:
    metrics = WorkerMetrics(host.config, role_name(host.roles))
    metrics.watch(host, clock)
    return metrics


async def until(condition: Callable[[], bool], what: str, timeout_s: float = HANG_S, pause_s: float = 0.005) -> None:
    """Looks again and again, since what is waited for happens in other threads and processes.

    With a pause of 0, at every turn of the event loop: for what lasts only a few of them.
    """
    patience = Patience(timeout_s)
    while not condition():
        assert not patience.is_over(), f"not within {patience.waited_s:.1f} s: {what}"
        await asyncio.sleep(pause_s)


@runtime_checkable
class CheckedEngine(Protocol):
    def check_idle(self) -> None:
        """Raises AssertionError unless no sequence is left and nothing holds a block."""
        ...


async def idle(host: WorkerHost) -> None:
    """Nothing is held: no leg, lease, import, sequence or block reference, and every count agrees."""

    def quiet() -> bool:
        stats = host.engine.stats()
        busy = host.num_legs or len(host.leases) or len(host.imports) or len(host.hub)
        return not busy and stats.ledger.idle and not stats.num_running and not stats.num_waiting

    await until(quiet, f"{host.worker_id} idle: {host.engine.stats()}, {host.num_legs} legs, {len(host.leases)} leases")
    assert isinstance(host.engine, CheckedEngine)
    host.engine.check_idle()
    assert getattr(host.engine, "alive", True), "the step thread lives, where there is one"


class ScriptedRouter:
    """Opens sessions with workers, and collects the events of each in order."""

    def __init__(self, incarnation: int = 99) -> None:
        self.incarnation = incarnation
        self._legs = 0

    def new_leg(self) -> int:
        self._legs += 1
        return self._legs

    def hello(self, host: WorkerHost, number: int = 1) -> worker_pb2.SessionHello:
        return worker_pb2.SessionHello(
            router_incarnation=self.incarnation, session_number=number, worker_incarnation=host.incarnation
        )

    @contextlib.asynccontextmanager
    async def session(self, host: WorkerHost, number: int = 1) -> AsyncIterator[ScriptedSession]:
        async with dial(host.address) as channel:
            session = ScriptedSession(worker_pb2_grpc.WorkerServiceStub(channel).Session())
            reader = asyncio.create_task(session.read())
            await session.send(hello=self.hello(host, number))
            heart = asyncio.create_task(session.beat())
            try:
                yield session
            finally:
                heart.cancel()
                session.call.cancel()
                await asyncio.wait([reader, heart])


class ScriptedSession:
    def __init__(self, call: Any) -> None:
        self.call = call
        self.events: list[Any] = []
        self.loads: list[types_pb2.LoadSnapshot] = []
        self.num_routers = 0
        """How many routers the worker says it has."""
        self.error: grpc.aio.AioRpcError | None = None
        self._arrived = asyncio.Event()
        self._writing = asyncio.Lock()

    async def send(self, **message: Any) -> None:
        async with self._writing:
            await self.call.write(worker_pb2.SessionRequest(**message))

    async def beat(self) -> None:
        """Sends heartbeats as a router does, until the session is over."""
        while not self.call.done():
            await self.send(heartbeat=worker_pb2.RouterHeartbeat())
            await asyncio.sleep(0.5)

    async def next(self, kind: str, leg: int) -> Any:
        """Returns the first event of this kind for the leg, whatever else came before; it is taken out."""
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
        """Returns token ids up to the finish (or `count` of them), checked for position, and the finish."""
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
                if response.HasField("num_routers"):
                    self.num_routers = response.num_routers
                self._arrived.set()
        except grpc.aio.AioRpcError as error:
            self.error = error
            self._arrived.set()


# Commands


def stopping(max_tokens: int) -> types_pb2.StoppingParams:
    return types_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True)


def prefill_command(leg: int, prompt: list[int] = PROMPT, max_tokens: int = 8, **more: Any) -> Any:
    return worker_pb2.PrefillCommand(
        leg=leg, request_id="r", token_ids=prompt, sampling=GREEDY, stopping=stopping(max_tokens), **more
    )


def decode_command(leg: int, started: Any = None, prompt: list[int] = PROMPT, max_tokens: int = 8, **more: Any) -> Any:
    handoff = worker_pb2.Handoff(lease_id=started.lease_id, source=started.source) if started else None
    return worker_pb2.DecodeCommand(
        leg=leg,
        request_id="r",
        token_ids=prompt,
        sampling=GREEDY,
        stopping=stopping(max_tokens),
        handoff=handoff,
        **more,
    )
