"""Tests a handoff between two real workers, driven session by session."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from baton.v1 import types_pb2, worker_pb2
from services.core.errors import RoleGone
from services.engine.schedule.sequence import Sequence
from services.rpc.status import from_status
from services.worker import host as worker_host
from tests.support.workers import (
    DECODE,
    MIXED,
    PREFILL,
    PROMPT,
    ScriptedRouter,
    decode_command,
    idle,
    prefill_command,
    running_worker,
    until,
    worker_config,
    worker_metrics,
)


async def alone(host: Any, router: ScriptedRouter, max_tokens: int = 8) -> list[int]:
    """Returns the output of the same request run whole on one worker."""
    leg = router.new_leg()
    async with router.session(host, number=1000 + leg) as session:
        await session.send(decode=decode_command(leg, max_tokens=max_tokens))
        ids, _ = await session.tokens(leg)
    return ids


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_the_handoff_equals_one_worker(model: Path, transport: str) -> None:
    router = ScriptedRouter()
    config = worker_config(model, transport=transport)
    async with running_worker(config, PREFILL) as source, running_worker(config, DECODE) as target:
        async with router.session(source) as prefill, router.session(target) as decode:
            leg = router.new_leg()
            await prefill.send(prefill=prefill_command(leg))
            started = await prefill.next("started", leg)
            decode_leg = router.new_leg()
            await decode.send(decode=decode_command(decode_leg, started))
            await decode.next("admitted", decode_leg)
            assert 0 < (await prefill.next("prompt_computed", leg)).num_tokens <= len(PROMPT)
            first, _ = await prefill.tokens(leg, count=1)
            await decode.next("ready", decode_leg)
            ids, finish = await decode.tokens(decode_leg)
            ended = await prefill.next("lease_ended", leg)
        assert ids[0] == first[0]
        assert len(ids) == 8
        assert finish.reason == types_pb2.FINISH_REASON_LENGTH
        assert finish.timings.transport == types_pb2.Transport.Value(f"TRANSPORT_{transport.upper()}")
        assert finish.timings.transfer_blocks == 7
        assert ended.reason == worker_pb2.LEASE_END_REASON_RELEASED
        await idle(target)
        assert ids == await alone(target, router)


async def test_blocks_that_the_destination_has_are_counted_and_not_moved(model: Path) -> None:
    """The second of two like prompts brings only the block that is computed anew."""
    router, config = ScriptedRouter(), worker_config(model)
    async with running_worker(config, PREFILL) as source, running_worker(config, DECODE) as target:
        moved = []
        async with router.session(source) as prefill, router.session(target) as decode:
            for _ in range(2):
                leg, decode_leg = router.new_leg(), router.new_leg()
                await prefill.send(prefill=prefill_command(leg))
                await decode.send(decode=decode_command(decode_leg, await prefill.next("started", leg)))
                _, finish = await decode.tokens(decode_leg)
                moved.append(finish.timings.transfer_blocks)
        metrics = worker_metrics(target)
        text = generate_latest(metrics.registry).decode()
        metrics.close()
    assert moved == [7, 1]
    assert "baton_kv_blocks_not_moved_total 6.0" in text


async def test_a_mixed_worker_adopts_its_own_lease(model: Path) -> None:
    router = ScriptedRouter()
    async with running_worker(worker_config(model), MIXED) as host:
        async with router.session(host) as session:
            leg, decode_leg = router.new_leg(), router.new_leg()
            await session.send(prefill=prefill_command(leg))
            started = await session.next("started", leg)
            await session.send(decode=decode_command(decode_leg, started))
            ids, finish = await session.tokens(decode_leg)
        assert finish.timings.transport == types_pb2.TRANSPORT_LOCAL
        assert finish.timings.transfer_bytes == 0
        assert ids == await alone(host, router)


@pytest.mark.parametrize("ends", ["cancelled", "completed"])
@pytest.mark.parametrize("is_local", [True, False], ids=["adopted", "imported"])
async def test_hashing_a_long_prompt_holds_up_nobody(
    model: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool, ends: str
) -> None:
    """Another leg of the session runs to its end meanwhile, and so may this one."""
    router, may_hash, hashing_on = ScriptedRouter(), threading.Event(), []
    config = worker_config(model)
    async with running_worker(config, MIXED) as source, running_worker(config, DECODE) as other:
        target = source if is_local else other
        hash_prompt = target.engine.hash_prompt

        def slow_hash(sequence: Sequence) -> None:
            hashing_on.append(threading.current_thread())
            assert may_hash.wait(30.0)
            hash_prompt(sequence)

        monkeypatch.setattr(target.engine, "hash_prompt", slow_hash)
        monkeypatch.setattr(worker_host, "_INLINE_HASHED_TOKENS", len(PROMPT) - 1)
        async with router.session(source) as prefill, contextlib.AsyncExitStack() as stack:
            decode = prefill if is_local else await stack.enter_async_context(router.session(target))
            leg, decode_leg, short_leg = router.new_leg(), router.new_leg(), router.new_leg()
            await prefill.send(prefill=prefill_command(leg))
            started = await prefill.next("started", leg)
            await decode.send(decode=decode_command(decode_leg, started))
            await until(lambda: bool(hashing_on), "it is hashed")
            await decode.send(decode=decode_command(short_leg, max_tokens=4))
            await decode.tokens(short_leg)
            assert hashing_on[0] is not threading.main_thread()
            if ends == "cancelled":
                await decode.send(cancel=worker_pb2.CancelLeg(leg=decode_leg))
                await until(lambda: target.num_legs == int(is_local), "the leg is over")
                may_hash.set()
                await prefill.send(cancel=worker_pb2.CancelLeg(leg=leg))
            else:
                may_hash.set()
                ids, _ = await decode.tokens(decode_leg)
                assert ids == await alone(target, router)
            await idle(target)


async def test_a_command_for_a_phase_that_the_worker_has_not_fails_its_leg_only(model: Path) -> None:
    router = ScriptedRouter()
    async with running_worker(worker_config(model), PREFILL) as host, router.session(host) as session:
        leg, misplaced = router.new_leg(), router.new_leg()
        await session.send(prefill=prefill_command(leg))
        started = await session.next("started", leg)
        await session.send(decode=decode_command(misplaced, started))
        failed = await session.next("failed", misplaced)
        assert isinstance(from_status(failed.status), RoleGone)
        assert failed.status.message == "this worker takes no decode commands"
        await session.tokens(leg, count=1)
        await session.send(cancel=worker_pb2.CancelLeg(leg=leg))
        await idle(host)


async def test_the_first_token_may_end_the_sequence(model: Path) -> None:
    router = ScriptedRouter()
    config = worker_config(model)
    async with running_worker(config, PREFILL) as source, running_worker(config, DECODE) as target:
        async with router.session(source) as prefill, router.session(target) as decode:
            leg, decode_leg = router.new_leg(), router.new_leg()
            await prefill.send(prefill=prefill_command(leg, max_tokens=1))
            started = await prefill.next("started", leg)
            await decode.send(decode=decode_command(decode_leg, started, max_tokens=1))
            ids, finish = await prefill.tokens(leg)
            assert len(ids) == 1
            assert finish.reason == types_pb2.FINISH_REASON_LENGTH
            await until(lambda: bool(decode.events), "the decode worker answers")


async def test_a_refusal_leaves_the_lease_and_another_fetch_succeeds(model: Path) -> None:
    router = ScriptedRouter()
    async with (
        running_worker(worker_config(model), PREFILL) as source,
        running_worker(worker_config(model, kv_blocks=4), DECODE) as small,
        running_worker(worker_config(model), DECODE) as large,
    ):
        async with router.session(source) as prefill, router.session(small) as tight, router.session(large) as roomy:
            leg, first_leg, second_leg = router.new_leg(), router.new_leg(), router.new_leg()
            await prefill.send(prefill=prefill_command(leg))
            started = await prefill.next("started", leg)
            # The small worker's context is smaller too; it must still answer as it would for a full pool.
            await tight.send(decode=decode_command(first_leg, started, prompt=PROMPT[:50]))
            refused = await tight.next("refused", first_leg)
            assert refused.missing_blocks > 0
            await roomy.send(decode=decode_command(second_leg, started))
            ids, _ = await roomy.tokens(second_leg)
            assert len(ids) == 8


@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
async def test_the_end_of_a_session_frees_everything(model: Path, who: str) -> None:
    router = ScriptedRouter()
    config = worker_config(model, max_num_batched_tokens=16)
    long = PROMPT * 6
    async with running_worker(config, PREFILL) as source, running_worker(config, DECODE) as target:
        async with router.session(source) as prefill, router.session(target) as decode:
            leg, decode_leg = router.new_leg(), router.new_leg()
            await prefill.send(prefill=prefill_command(leg, long, max_tokens=300))
            started = await prefill.next("started", leg)
            await decode.send(decode=decode_command(decode_leg, started, long, max_tokens=300))
            await decode.next("admitted", decode_leg)
            if who in ("prefill", "both"):
                prefill.call.cancel()
            if who in ("decode", "both"):
                decode.call.cancel()
            if who == "prefill":
                failed = await decode.next("import_failed", decode_leg)
                assert not failed.lease_alive
            if who == "decode":
                await prefill.tokens(leg, count=1)  # the lease outlives the decode leg


async def test_cancel_in_every_phase_frees_everything(model: Path) -> None:
    router = ScriptedRouter()
    config = worker_config(model, max_num_batched_tokens=16)
    async with running_worker(config, PREFILL) as source, running_worker(config, DECODE) as target:
        async with router.session(source) as prefill, router.session(target) as decode:
            for round_number in range(12):
                leg, decode_leg = router.new_leg(), router.new_leg()
                prompt = [7 + round_number, *PROMPT]
                await prefill.send(prefill=prefill_command(leg, prompt, max_tokens=50))
                if round_number % 4 > 0:
                    started = await prefill.next("started", leg)
                    await decode.send(decode=decode_command(decode_leg, started, prompt, max_tokens=50))
                if round_number % 4 > 1:
                    await decode.next("admitted", decode_leg)
                if round_number % 4 > 2:
                    await decode.tokens(decode_leg, count=5)
                await prefill.send(cancel=worker_pb2.CancelLeg(leg=leg))
                await decode.send(cancel=worker_pb2.CancelLeg(leg=decode_leg))
            await asyncio.gather(idle(source), idle(target))


async def test_the_deadline_ends_a_leg_with_its_status(model: Path) -> None:
    router = ScriptedRouter()
    config = worker_config(model)
    async with running_worker(config, DECODE) as host, router.session(host) as decode:
        leg = router.new_leg()
        await decode.send(decode=decode_command(leg, max_tokens=900, remaining_ms=150))
        failed = await decode.next("failed", leg)
        assert failed.status.code == 4  # DEADLINE_EXCEEDED
        await idle(host)


async def test_a_drained_worker_finishes_what_it_has_and_takes_nothing_new(model: Path) -> None:
    router = ScriptedRouter()
    async with running_worker(worker_config(model), DECODE) as host, router.session(host) as decode:
        running, refused = router.new_leg(), router.new_leg()
        await decode.send(decode=decode_command(running, max_tokens=200))
        await decode.tokens(running, count=3)
        host.leave(20.0, "the test says so")
        draining = asyncio.create_task(host.left())
        await until(lambda: decode.loads[-1].draining, "the snapshot says so")
        await decode.send(decode=decode_command(refused))
        failed = await decode.next("failed", refused)
        assert failed.status.code == 14  # UNAVAILABLE
        ids, _ = await decode.tokens(running)
        await draining
        assert ids
