"""Tests that a router that takes nothing is judged although writes to it wait for ever: what blocks them is HTTP/2 flow
control, because it does not read. The router's own watch over workers: unit/router/test_sessions.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from services.core.clock import ManualClock
from services.worker.host import WorkerHost
from tests.support.patience import HANG_S
from tests.support.trusted import dial
from tests.support.workers import PREFILL, ScriptedRouter, running_worker, until, worker_config

TIMES = {"silence_s": 2.0, "heartbeat_s": 0.1, "lease_ttl_s": 3600.0}
PROMPT = list(range(5, 105))
MIB = 1 << 20
Request = worker_pb2.SessionRequest


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


@pytest.mark.parametrize("speaks", [True, False], ids=["although it speaks", "and is silent"])
async def test_a_router_that_reads_nothing_is_given_up(model: Path, speaks: bool) -> None:
    """Its lease is released: what it does not take would pile up here. It is told of the end when it reads again: the
    write that was given up does not keep the call open."""
    clock = ManualClock()
    async with (
        running_worker(worker_config(model, **TIMES), PREFILL, clock=clock) as host,
        router_that_never_reads(host) as router,
    ):
        (session,) = host.sessions
        assert len(host.leases) == 1
        for _ in range(64):
            failed = worker_pb2.LegFailed(leg=999)
            failed.status.message = "x" * MIB
            session.emit(worker_pb2.LegEvent(failed=failed))
        session.flush()
        heart = asyncio.create_task(router.beat_for_ever()) if speaks else None

        def has_ended() -> bool:
            clock.advance(0.4)  # less than a gap, which does not count
            return not len(host.sessions)

        await until(has_ended, "its session is gone", pause_s=TIMES["heartbeat_s"])
        assert session.ended.is_set()
        assert not len(host.leases)
        assert not router.call.done(), "nobody but the worker's watch has ended it"
        if heart is not None:
            heart.cancel()
            await asyncio.wait([heart])
        async with asyncio.timeout(HANG_S):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await router.call.read() is not grpc.aio.EOF:
                    pass
        assert router.call.done()
