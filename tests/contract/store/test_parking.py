"""Tests what a store makes of ParkCommands, with real workers at both ends, driven session by session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import types_pb2, worker_pb2
from services.core.errors import Draining, InvalidRequest, LayoutMismatch, LeaseInvalid, ProtocolViolation, RoleGone
from services.rpc.status import from_status
from services.worker.host import WorkerHost
from tests.support.patience import HANG_S
from tests.support.stores import park_command, running_store
from tests.support.workers import (
    DECODE,
    PREFILL,
    PROMPT,
    ScriptedRouter,
    ScriptedSession,
    decode_command,
    idle,
    prefill_command,
    running_worker,
    until,
    worker_config,
)

NUM_BLOCKS = 7
"""Of the prompt."""


@dataclass
class Three:
    """Has a prefill worker, a store and a decode worker, with a session to each."""

    router: ScriptedRouter
    source: WorkerHost
    store: WorkerHost
    target: WorkerHost
    prefill: ScriptedSession
    park: ScriptedSession
    decode: ScriptedSession

    async def sealed(self, **more: Any) -> Any:
        """Returns the PrefillStarted of a new prefill leg, once its lease is sealed."""
        leg = self.router.new_leg()
        await self.prefill.send(prefill=prefill_command(leg, **more))
        started = await self.prefill.next("started", leg)
        for _ in range(more.get("n", 1)):
            await self.prefill.next("tokens", leg)
        return started

    async def parked(self, started: Any, **more: Any) -> Any:
        """Returns the Parked event of a handoff that the store takes."""
        leg = self.router.new_leg()
        await self.park.send(park=park_command(leg, started, **more))
        await self.park.next("admitted", leg)
        return await self.park.next("parked", leg)

    async def answer(self, started: Any, **more: Any) -> list[int]:
        leg = self.router.new_leg()
        await self.decode.send(decode=decode_command(leg, started, **more))
        ids, _ = await self.decode.tokens(leg)
        return ids


@contextlib.asynccontextmanager
async def three(model: Path, num_blocks: int = 64, transport: str = "auto", **store: Any) -> AsyncIterator[Three]:
    router, config = ScriptedRouter(), worker_config(model, transport=transport)
    async with (
        running_worker(config, PREFILL) as source,
        running_worker(config, DECODE) as target,
        running_store(source, num_blocks, transport=transport, **store) as kept,
        router.session(source) as prefill,
        router.session(kept) as park,
        router.session(target) as decode,
    ):
        yield Three(router, source, kept, target, prefill, park, decode)


async def alone(host: WorkerHost, router: ScriptedRouter) -> list[int]:
    leg = router.new_leg()
    async with router.session(host, number=1000 + leg) as session:
        await session.send(decode=decode_command(leg))
        ids, _ = await session.tokens(leg)
    return ids


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_a_parked_handoff_is_the_same(model: Path, transport: str) -> None:
    async with three(model, transport=transport) as cluster:
        started = await cluster.sealed()
        parked = await cluster.parked(started)
        ended = await cluster.prefill.next("lease_ended", started.leg)
        assert ended.reason == worker_pb2.LEASE_END_REASON_RELEASED
        await idle(cluster.source)
        assert cluster.store.engine.stats().ledger.leased == NUM_BLOCKS
        ids = await cluster.answer(parked)
        ended = await cluster.park.next("lease_ended", parked.leg)
        assert ended.reason == worker_pb2.LEASE_END_REASON_RELEASED
        await idle(cluster.store)
        assert ids == await alone(cluster.target, cluster.router)


async def test_the_source_may_be_gone_once_its_handoff_is_parked(model: Path) -> None:
    router = ScriptedRouter()
    async with running_worker(worker_config(model), DECODE) as target, router.session(target) as decode:
        async with contextlib.AsyncExitStack() as left:
            source = await left.enter_async_context(running_worker(worker_config(model), PREFILL))
            store = await left.enter_async_context(running_store(target))
            park = await left.enter_async_context(router.session(store))
            prefill = await left.enter_async_context(router.session(source))
            cluster = Three(router, source, store, target, prefill, park, decode)
            parked = await cluster.parked(await cluster.sealed())
            source.sessions.end_all()
            await source.server.stop()
            ids = await cluster.answer(parked)
        assert ids == await alone(target, router)


async def test_several_answers_have_their_first_tokens(model: Path) -> None:
    sampling = types_pb2.SamplingParams(temperature=5.0, seed=7)
    async with three(model) as cluster:
        leg = cluster.router.new_leg()
        command = prefill_command(leg, n=3)
        command.sampling.CopyFrom(sampling)
        await cluster.prefill.send(prefill=command)
        started = await cluster.prefill.next("started", leg)
        first = {each.index: each.token_ids[0] for each in [await cluster.prefill.next("tokens", leg) for _ in "abc"]}
        parked = await cluster.parked(started, n=3)
        leg = cluster.router.new_leg()
        command = decode_command(leg, parked, n=3)
        command.sampling.CopyFrom(sampling)
        await cluster.decode.send(decode=command)
        repeated: dict[int, int] = {}
        while len(repeated) < 3:
            tokens = await cluster.decode.next("tokens", leg)
            repeated.setdefault(tokens.index, tokens.token_ids[0])
        assert repeated == first
        await cluster.decode.send(cancel=worker_pb2.CancelLeg(leg=leg))


async def test_a_full_store_refuses_at_once_and_leaves_the_lease(model: Path) -> None:
    async with three(model, num_blocks=16) as cluster:
        first, second, third = [await cluster.sealed() for _ in "abc"]
        await cluster.parked(first)
        parked = await cluster.parked(second)
        leg = cluster.router.new_leg()
        await cluster.park.send(park=park_command(leg, third))
        refused = await cluster.park.next("refused", leg)
        assert (refused.needed_blocks, refused.missing_blocks) == (NUM_BLOCKS, 2 * NUM_BLOCKS + NUM_BLOCKS - 16)
        await cluster.park.send(cancel=worker_pb2.CancelLeg(leg=parked.leg))
        await until(lambda: cluster.store.engine.stats().ledger.leased == NUM_BLOCKS, "the lease is aborted")
        await cluster.parked(third)
        for session in (cluster.park, cluster.prefill):
            session.call.cancel()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"num_tokens": len(PROMPT) - 1}, ProtocolViolation),
        ({"n": 2}, ProtocolViolation),
        ({"output_base": 1}, ProtocolViolation),
    ],
)
async def test_a_seal_that_contradicts_the_command_is_not_kept(
    model: Path, wrong: dict[str, int], error: type[Exception]
) -> None:
    async with three(model) as cluster:
        started, leg = await cluster.sealed(), cluster.router.new_leg()
        await cluster.park.send(park=park_command(leg, started, **wrong))
        failed = await cluster.park.next("import_failed", leg)
        assert isinstance(from_status(failed.status), error)
        await idle(cluster.store)
        cluster.prefill.call.cancel()


async def test_what_is_no_handoff_of_these_workers_is_refused(model: Path) -> None:
    async with three(model) as cluster:
        started = await cluster.sealed()
        other = worker_pb2.PrefillStarted()
        other.CopyFrom(started)
        other.source.layout.weights_digest = "0" * 32
        unknown = worker_pb2.PrefillStarted()
        unknown.CopyFrom(started)
        unknown.lease_id = bytes(16)
        for wrong, kind, error in (
            (park_command(cluster.router.new_leg(), other), "import_failed", LayoutMismatch),
            (park_command(cluster.router.new_leg(), unknown), "import_failed", LeaseInvalid),
            (park_command(cluster.router.new_leg(), started, num_tokens=0), "failed", InvalidRequest),
            (park_command(cluster.router.new_leg(), started, n=17), "failed", InvalidRequest),
        ):
            await cluster.park.send(park=wrong)
            failed = await cluster.park.next(kind, wrong.leg)
            assert isinstance(from_status(failed.status), error)
        huge = park_command(cluster.router.new_leg(), started, num_tokens=(1 << 31) - 1)
        await cluster.park.send(park=huge)
        await cluster.park.next("refused", huge.leg)
        prefill = prefill_command(cluster.router.new_leg())
        await cluster.park.send(prefill=prefill)
        failed = await cluster.park.next("failed", prefill.leg)
        assert isinstance(from_status(failed.status), RoleGone)
        await idle(cluster.store)
        assert await cluster.answer(started), "the lease was left alone"


async def test_what_nobody_holds_expires(model: Path) -> None:
    async with three(model, lease_ttl_s=0.2) as cluster:
        parked = await cluster.parked(await cluster.sealed())
        ended = await cluster.park.next("lease_ended", parked.leg)
        assert ended.reason == worker_pb2.LEASE_END_REASON_EXPIRED
        await idle(cluster.store)


async def test_what_its_router_holds_does_not_expire(model: Path) -> None:
    async with three(model, lease_ttl_s=0.5) as cluster:
        parked = await cluster.parked(await cluster.sealed())
        for _ in range(10):
            await cluster.park.send(heartbeat=worker_pb2.RouterHeartbeat(held_leases=[parked.lease_id]))
            await asyncio.sleep(0.1)
        assert not [event for event in cluster.park.events if event.WhichOneof("event") == "lease_ended"]
        assert await cluster.answer(parked)


async def test_the_deadline_ends_what_is_parked(model: Path) -> None:
    async with three(model) as cluster:
        parked = await cluster.parked(await cluster.sealed(), remaining_ms=300)
        failed = await cluster.park.next("failed", parked.leg)
        assert from_status(failed.status).reason == "DEADLINE_EXCEEDED"
        await idle(cluster.store)


async def test_everything_ends_with_its_session(model: Path) -> None:
    async with three(model) as cluster:
        parked = await cluster.parked(await cluster.sealed())
        cluster.park.call.cancel()
        await idle(cluster.store)
        leg = cluster.router.new_leg()
        await cluster.decode.send(decode=decode_command(leg, parked))
        failed = await cluster.decode.next("import_failed", leg)
        assert not failed.lease_alive


async def test_a_store_that_leaves_takes_nothing_new_and_hands_over_what_it_has(model: Path) -> None:
    async with three(model) as cluster:
        parked = await cluster.parked(await cluster.sealed())
        second, leg = await cluster.sealed(), cluster.router.new_leg()
        cluster.store.leave(30.0, "the test says so")
        await cluster.park.send(park=park_command(leg, second))
        failed = await cluster.park.next("failed", leg)
        assert isinstance(from_status(failed.status), Draining)
        left = asyncio.create_task(cluster.store.left())
        assert await cluster.answer(parked)
        async with asyncio.timeout(HANG_S):
            await left
        cluster.prefill.call.cancel()
