"""Tests that a peer of a session that says nothing, or takes nothing, is judged although writes to it wait for ever.

Both ends are real gRPC: what blocks the writes is HTTP/2 flow control, because the peer does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import control_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from services.core.clock import MonotonicClock
from services.core.timeouts import AwakeClock
from services.router.coordinator.events import WorkerInfo
from services.router.policy import Role
from services.router.workers.sessions import SessionTimes, WorkerLink
from services.rpc.serving import GrpcServer
from services.worker.host import WorkerHost
from services.worker.session import WORKER_SERVICE, RouterSession
from tests.support.link_owner import Owner
from tests.support.patience import HANG_S
from tests.support.trusted import CLUSTER_TOKEN, dial
from tests.support.workers import PREFILL, ScriptedRouter, running_worker, until, worker_config

pytestmark = pytest.mark.clock

SILENCE_S = 2.0
TIMES = {"silence_s": SILENCE_S, "heartbeat_s": 0.1, "lease_ttl_s": 3600.0}
PROMPT = list(range(5, 105))
MIB = 1 << 20
Request = worker_pb2.SessionRequest


def the_session(host: WorkerHost) -> RouterSession:
    (session,) = host.sessions
    return session


class NeverReads:
    """Is a router that has a lease sealed and held, and reads nothing after that."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.lease_id = b""

    async def begin(self, host: WorkerHost) -> None:
        await self.call.write(Request(hello=ScriptedRouter().hello(host)))
        command = worker_pb2.PrefillCommand(
            leg=1,
            request_id="r",
            token_ids=PROMPT,
            sampling=types_pb2.SamplingParams(temperature=0.0),
            stopping=types_pb2.StoppingParams(max_tokens=8, ignore_eos=True),
        )
        await self.call.write(Request(prefill=command))
        async with asyncio.timeout(HANG_S):
            while not self.lease_id:
                for event in (await self.call.read()).events:
                    self.lease_id = event.started.lease_id or self.lease_id
        await self.beat()
        await until(lambda: any(lease.held for lease in host.leases), "the lease is held")

    async def beat(self) -> None:
        await self.call.write(Request(heartbeat=worker_pb2.RouterHeartbeat(held_leases=[self.lease_id])))

    async def beat_for_ever(self) -> None:
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            while True:
                await self.beat()
                await asyncio.sleep(TIMES["heartbeat_s"])


@contextlib.asynccontextmanager
async def router_that_never_reads(host: WorkerHost) -> AsyncIterator[NeverReads]:
    async with dial(host.address) as channel:
        peer = NeverReads(worker_pb2_grpc.WorkerServiceStub(channel).Session())
        await peer.begin(host)
        yield peer


async def fill(session: RouterSession, router: NeverReads) -> None:
    """Emits a mebibyte at a time until the write of one does not end. The router speaks until then."""
    for _ in range(64):
        await router.beat()
        failed = worker_pb2.LegFailed(leg=999)
        failed.status.message = "x" * MIB
        session.emit(worker_pb2.LegEvent(failed=failed))
        session.flush()
        try:
            await until(lambda: not session._outbox._events, "it is taken", timeout_s=0.3)
        except AssertionError:
            return
    raise AssertionError("64 MiB were written to a peer that reads nothing")


async def test_a_router_that_neither_reads_nor_speaks(model: Path) -> None:
    async with running_worker(worker_config(model, **TIMES), PREFILL) as host, router_that_never_reads(host) as router:
        session = the_session(host)
        await fill(session, router)
        assert len(host.leases) == 1
        await until(lambda: not len(host.leases), "its lease is released", timeout_s=4 * SILENCE_S)
        assert session.ended.is_set()
        await until(lambda: not len(host.sessions), "its session is gone")
        assert not router.call.done(), "nobody but the worker's watch has ended it"


async def test_a_router_that_does_not_read_although_it_speaks(model: Path) -> None:
    """The router is given up although its heartbeats come: what it does not take would pile up
    here."""
    async with running_worker(worker_config(model, **TIMES), PREFILL) as host, router_that_never_reads(host) as router:
        session = the_session(host)
        await fill(session, router)
        heart = asyncio.create_task(router.beat_for_ever())
        await until(session.ended.is_set, "its session ends", timeout_s=4 * SILENCE_S)
        assert not len(host.leases)
        heart.cancel()
        await asyncio.wait([heart])


async def test_the_end_is_told_to_a_router_that_reads_again(model: Path) -> None:
    """The call is not kept open by the write that was given up."""
    async with running_worker(worker_config(model, **TIMES), PREFILL) as host, router_that_never_reads(host) as router:
        await fill(the_session(host), router)
        await until(lambda: not len(host.sessions), "its session is gone", timeout_s=4 * SILENCE_S)
        async with asyncio.timeout(10):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await router.call.read() is not grpc.aio.EOF:
                    pass
        assert router.call.done()


class NeverListens(worker_pb2_grpc.WorkerServiceServicer):
    """Is a worker that says that it lives, and reads nothing after the hello."""

    async def Session(self, request_iterator: Any, context: Any) -> None:
        await anext(aiter(request_iterator))
        while True:
            worker = control_pb2.WorkerDescription()
            await context.write(worker_pb2.SessionResponse(load=types_pb2.LoadSnapshot(), worker=worker))
            await asyncio.sleep(TIMES["heartbeat_s"])


async def test_a_worker_that_does_not_read_although_it_speaks() -> None:
    """Commands to it would pile up in the router, and what they ask for would never be done."""
    server = GrpcServer(token=CLUSTER_TOKEN)
    server.add(WORKER_SERVICE, worker_pb2_grpc.add_WorkerServiceServicer_to_server, NeverListens())
    await server.start()
    description = control_pb2.WorkerDescription(worker_id="p", address=server.address)
    info = WorkerInfo("p", Role.PREFILL, 1, "", 16, 8, 128, 4, description=description)
    owner: Any = Owner()
    times, clock = SessionTimes(TIMES["heartbeat_s"], SILENCE_S), AwakeClock(MonotonicClock())
    link = WorkerLink(info, owner, 1, 1, times, clock, dial)
    link.start()
    await owner.opened.wait()
    for leg in range(16):
        command = worker_pb2.PrefillCommand(leg=leg, request_id="r" * MIB)
        link.send(Request(prefill=command))
    async with asyncio.timeout(4 * SILENCE_S):
        assert await owner.lost == (f"takes nothing for {SILENCE_S:g} s", True)
    await server.stop()
