"""Tests how a worker brings a prefix from another's pool before it computes the rest, session by session."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import kvtransfer_pb2, types_pb2, worker_pb2
from services.kv import prefix_admission
from services.kvtransfer.servicer import KVTransferServicer
from services.worker import prefixes
from services.worker.host import WorkerHost
from tests.support.bad_peers import BadSource, FlippingMemory
from tests.support.blocks import cached
from tests.support.workers import (
    DECODE,
    MIXED,
    PREFILL,
    PROMPT,
    Roles,
    ScriptedRouter,
    decode_command,
    idle,
    pools_that_cannot_be_mapped,
    prefill_command,
    running_worker,
    until,
    worker_config,
)

NUM_BLOCKS = 6
"""Blocks of the prompt's 100 tokens that a prefix cache may have."""
CACHED = NUM_BLOCKS * 16


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a prefix more time than computing it would take: the model is tiny, and the machine may be busy."""
    monkeypatch.setattr(prefixes, "_LEAST_S", 10.0)
    monkeypatch.setattr(prefixes, "_MOST_S", 10.0)


async def alone(host: WorkerHost, router: ScriptedRouter, **more: Any) -> list[int]:
    """Returns the output of a request that is run whole on one worker."""
    leg = router.new_leg()
    async with router.session(host, number=1000 + leg) as session:
        await session.send(decode=decode_command(leg, **more))
        ids, _ = await session.tokens(leg)
    await idle(host)
    return ids


async def first_of(host: WorkerHost, router: ScriptedRouter, **more: Any) -> tuple[int, int]:
    """Returns how many tokens a prefill leg finds cached, and its token."""
    leg = router.new_leg()
    async with router.session(host, number=1000 + leg) as session:
        await session.send(prefill=prefill_command(leg, **more))
        started = await session.next("started", leg)
        (token_id, *_), _ = await session.tokens(leg, count=1)
        await session.send(cancel=worker_pb2.CancelLeg(leg=leg))
        await until(lambda: not host.num_legs, "the leg is over")
    await idle(host)
    return started.cached_tokens, token_id


def brought(host: WorkerHost) -> int:
    return host.tally.prefix_tokens_brought["peer"]


@pytest.mark.parametrize("checksums", ["never", "always"])
@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("phase", ["prefill", "unsplit"])
async def test_what_another_has_computed_is_not_computed_again(
    model: Path, phase: str, transport: str, checksums: str
) -> None:
    router, config = ScriptedRouter(), worker_config(model, transport=transport, checksums=checksums)
    async with running_worker(config, MIXED) as source, running_worker(config, MIXED) as target:
        ids = await alone(source, router)
        if phase == "prefill":
            assert await first_of(target, router, prefix_source=source.source()) == (CACHED, ids[0])
        else:
            assert await alone(target, router, prefix_source=source.source()) == ids
        assert brought(target) == source.transfer.lender.tokens_lent == CACHED
        assert await first_of(target, router, prefix_source=source.source()) == (CACHED, ids[0])
        assert brought(target) == CACHED, "what is here is not brought again"
        await idle(source)


async def test_a_pool_that_cannot_be_mapped_lends_too(model: Path) -> None:
    router, config = ScriptedRouter(), worker_config(model)
    with pools_that_cannot_be_mapped():
        async with running_worker(config, MIXED) as source, running_worker(config, MIXED) as target:
            ids = await alone(source, router)
            assert await alone(target, router, prefix_source=source.source()) == ids
            assert brought(target) == CACHED


async def test_only_what_is_lacking_is_brought(model: Path) -> None:
    router, config = ScriptedRouter(), worker_config(model)
    async with running_worker(config, MIXED) as source, running_worker(config, MIXED) as target:
        ids = await alone(source, router)
        await alone(target, router, prompt=PROMPT[:40])
        assert await first_of(target, router, prefix_source=source.source()) == (CACHED, ids[0])
        assert brought(target) == CACHED - 32


@pytest.mark.process
async def test_a_constraint_is_compiled_meanwhile(model: Path) -> None:
    """A constraint that is invalid fails the leg, and what was being brought is given up."""
    router, config = ScriptedRouter(), worker_config(model)
    async with running_worker(config, MIXED) as source, running_worker(config, MIXED) as target:
        await alone(source, router)
        async with router.session(target) as session:
            constraint = types_pb2.Constraint(grammar="no grammar at all {{{")
            command = prefill_command(leg := router.new_leg(), prefix_source=source.source(), constraint=constraint)
            await session.send(prefill=command)
            await session.next("failed", leg)
        await idle(target)


async def test_namespaces_are_kept_apart(model: Path) -> None:
    router, config = ScriptedRouter(), worker_config(model)
    async with running_worker(config, MIXED) as source, running_worker(config, MIXED) as target:
        await alone(source, router, cache_salt="one")
        assert (await first_of(target, router, cache_salt="other", prefix_source=source.source()))[0] == 0
        assert (await first_of(target, router, prefix_source=source.source()))[0] == 0
        assert (await first_of(target, router, cache_salt="one", prefix_source=source.source()))[0] == CACHED


async def test_a_prompt_that_is_scored_is_computed(model: Path) -> None:
    router, config = ScriptedRouter(), worker_config(model)
    async with running_worker(config, MIXED) as source, running_worker(config, MIXED) as target:
        ids = await alone(source, router)
        assert await first_of(target, router, prefix_source=source.source(), prompt_logprobs=1) == (0, ids[0])
        assert brought(target) == 0


async def test_of_two_that_lack_the_same_one_brings_it(model: Path) -> None:
    router, config = ScriptedRouter(), worker_config(model)
    async with running_worker(config, MIXED) as source, running_worker(config, MIXED) as target:
        ids = await alone(source, router)
        prompts = [PROMPT, PROMPT, PROMPT[:90] + [7] * 40]
        legs = [router.new_leg() for _ in prompts]
        async with router.session(target) as session:
            for leg, prompt in zip(legs, prompts, strict=True):
                await session.send(prefill=prefill_command(leg, prompt=prompt, prefix_source=source.source()))
            started = [await session.next("started", leg) for leg in legs]
            assert [each.cached_tokens for each in started] == [CACHED, CACHED, 80]
            assert [(await session.tokens(leg, count=1))[0][0] for leg in legs[:2]] == ids[:1] * 2
        assert brought(target) == CACHED
        await idle(target)


@pytest.mark.parametrize("roles", [PREFILL, DECODE], ids=["prefill", "unsplit"])
async def test_a_cancelled_leg_frees_what_is_being_brought_once_no_copy_can_write_it(
    model: Path, roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, config = ScriptedRouter(), worker_config(model)
    async with running_worker(config, MIXED) as source, running_worker(config, roles) as target:
        await alone(source, router)
        release = asyncio.Event()
        write, loop, writing = target.fetcher._write, asyncio.get_running_loop(), asyncio.Event()

        def held(*args: Any) -> None:
            loop.call_soon_threadsafe(writing.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20)
            write(*args)

        monkeypatch.setattr(target.fetcher, "_write", held)
        async with router.session(target) as session:
            leg, where = router.new_leg(), source.source()
            if roles is PREFILL:
                await session.send(prefill=prefill_command(leg, prefix_source=where))
            else:
                await session.send(decode=decode_command(leg, prefix_source=where))
            await writing.wait()
            load = target.load_snapshot()
            assert load.blocks_importing == NUM_BLOCKS
            assert load.num_running == 1, "it does not seem to be at rest"
            assert load.queued_prefill_tokens == len(PROMPT)
            await session.send(cancel=worker_pb2.CancelLeg(leg=leg))
            await until(lambda: not target.num_legs, "the leg is over")
            assert target.engine.stats().ledger.importing == NUM_BLOCKS
            release.set()
            await idle(target)
        assert target.engine.num_cached([]) == brought(target) == 0
        await until(lambda: source.transfer.lender.num_lends == 0, "the loan is given back")


@pytest.mark.parametrize("then", ["it goes on", "it stops"])
async def test_a_loan_that_comes_too_late_is_given_back(
    model: Path, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "_MOST_S", 0.2)
    may_answer, lend = asyncio.Event(), KVTransferServicer.Lend

    async def late(*args: Any) -> kvtransfer_pb2.LendResponse:
        answer = await lend(*args)
        await may_answer.wait()
        return answer

    monkeypatch.setattr(KVTransferServicer, "Lend", late)
    router, config = ScriptedRouter(), worker_config(model, lease_ttl_s=600.0)
    async with running_worker(config, MIXED) as source:
        async with running_worker(config, MIXED) as target:
            ids = await alone(source, router)
            assert await first_of(target, router, prefix_source=source.source()) == (0, ids[0])
            assert target.tally.prefixes_failed["out_of_time"] == 1
            assert source.transfer.lender.num_lends == 1
            may_answer.set()
            if then == "it goes on":
                await until(lambda: source.transfer.lender.num_lends == 0, "the loan is given back")
        await until(lambda: source.transfer.lender.num_lends == 0, "the loan is given back")
        await idle(source)


async def test_no_room_means_that_it_is_computed(model: Path) -> None:
    router, config = ScriptedRouter(), worker_config(model, kv_blocks=24)
    async with running_worker(config, MIXED) as source, running_worker(config, MIXED) as target:
        ids = await alone(source, router)
        prompt = [3] * 315
        async with router.session(target) as session:
            await session.send(prefill=prefill_command(first := router.new_leg(), prompt=prompt))
            await session.tokens(first, count=1)
            await session.send(decode=decode_command(leg := router.new_leg(), prefix_source=source.source()))
            await until(lambda: target.tally.prefixes_failed["overloaded"] == 1, "it is not brought")
            await session.send(cancel=worker_pb2.CancelLeg(leg=first))
            assert (await session.tokens(leg))[0] == ids
        assert brought(target) == 0
        await until(lambda: source.transfer.lender.num_lends == 0, "the loan is given back")


async def test_at_most_a_quarter_of_the_pool_is_brought(model: Path) -> None:
    router = ScriptedRouter()
    async with (
        running_worker(worker_config(model), MIXED) as source,
        running_worker(worker_config(model, kv_blocks=16), MIXED) as target,
    ):
        ids = await alone(source, router)
        assert await first_of(target, router, prefix_source=source.source()) == (64, ids[0])
        assert prefix_admission.most_to_bring(16, 0) == 4


# -- sources that are none


async def check_computes(target: WorkerHost, router: ScriptedRouter, ids: list[int], where: Any) -> None:
    assert await first_of(target, router, prefix_source=where) == (0, ids[0])
    assert brought(target) == 0
    assert target.engine.stats().ledger.importing == 0


@pytest.mark.parametrize("what", ["itself", "another layout", "another incarnation", "nobody there", "cache is empty"])
async def test_a_source_that_cannot_lend_costs_only_the_computing(model: Path, what: str) -> None:
    router, config = ScriptedRouter(), worker_config(model)
    async with running_worker(config, MIXED) as source, running_worker(config, MIXED) as target:
        where = (target if what == "itself" else source).source()
        ids = await alone(source, router, prompt=PROMPT if what != "cache is empty" else PROMPT[::-1])
        if what == "cache is empty":
            ids = await alone(target, router, cache_salt="apart")
        if what == "another layout":
            where.layout.weights_digest = "others"
        if what == "another incarnation":
            where.incarnation += 1
        if what == "nobody there":
            where.address = "127.0.0.1:1"
        await check_computes(target, router, ids, where)


LIES: dict[str, tuple[int | None, int, int | None]] = {
    "it lends more than was asked for": (NUM_BLOCKS + 1, 0, None),
    "it lends less than nothing": (-1, 0, None),
    "it seals fewer blocks than it lends": (NUM_BLOCKS, NUM_BLOCKS - 1, CACHED),
    "it seals more tokens": (NUM_BLOCKS, NUM_BLOCKS, CACHED + 16),
    "it seals a partial block": (NUM_BLOCKS, NUM_BLOCKS, CACHED - 1),
    "its stream ends": (NUM_BLOCKS, NUM_BLOCKS, None),
    "it never answers": (None, 0, None),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_source_that_lies_costs_only_the_computing(
    model: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, config = ScriptedRouter(), worker_config(model)
    async with running_worker(config, MIXED) as source, running_worker(config, MIXED) as target:
        ids = await alone(source, router)
        if lie == "it never answers":
            monkeypatch.setattr(prefixes, "_MOST_S", 0.2)
        bad = BadSource(source)
        bad.num_lent, bad.num_blocks, num_tokens = LIES[lie]
        if num_tokens is not None:
            bad.seal = kvtransfer_pb2.FetchSealed(num_tokens=num_tokens)
        async with bad.running():
            await check_computes(target, router, ids, bad.where())
            assert sum(target.tally.prefixes_failed.values()) == 1
            await alone(target, router, prompt=PROMPT[::-1], prefix_source=bad.where())
            assert sum(target.tally.prefixes_failed.values()) == 1, "it is left alone for a while"


async def test_what_looks_like_the_end_of_an_answer_is_none(model: Path) -> None:
    router, config = ScriptedRouter(), worker_config(model)
    async with running_worker(config, MIXED) as source, running_worker(config, MIXED) as target:
        ids = await alone(source, router)
        bad = BadSource(source)
        bad.num_lent, bad.num_blocks = NUM_BLOCKS, NUM_BLOCKS
        bad.seal = kvtransfer_pb2.FetchSealed(num_tokens=CACHED, first_token=types_pb2.SequenceTokens(token_ids=[1]))
        bad.seal.first_token.finish.reason = types_pb2.FINISH_REASON_STOP
        async with bad.running():
            await check_computes(target, router, ids, bad.where())


async def test_a_block_that_arrives_damaged_is_not_used(model: Path) -> None:
    router, config = ScriptedRouter(), worker_config(model)
    async with running_worker(config, MIXED) as source, running_worker(config, MIXED) as target:
        ids = await alone(source, router)
        FlippingMemory(target).num_flips = 1
        await check_computes(target, router, ids, source.source())
        assert target.tally.prefixes_failed["checksum"] == 1


async def test_a_prefix_that_was_lent_is_no_handoff(model: Path) -> None:
    router, config = ScriptedRouter(), worker_config(model)
    async with running_worker(config, MIXED) as source, running_worker(config, MIXED) as target:
        await alone(source, router)
        for host in (target, source):  # one imports, the other would adopt
            hashes = list(cached(source.engine))[:NUM_BLOCKS]
            lease = source.transfer.lender.lend(hashes)
            assert lease is not None
            started = worker_pb2.PrefillStarted(lease_id=lease.lease_id, source=source.source())
            async with router.session(host, number=5000 + router.new_leg()) as session:
                await session.send(decode=decode_command(leg := router.new_leg(), started, prompt=PROMPT[:CACHED]))
                assert "PROTOCOL_VIOLATION" in str((await session.next("import_failed", leg)).status)
            source.leases.abort(lease.lease_id, source.awake.now())
        assert source.engine.stats().ledger.leased == 0


async def test_what_failed_sources_leave_is_bounded(model: Path) -> None:
    router, config = ScriptedRouter(), worker_config(model)
    async with running_worker(config, MIXED) as source, running_worker(config, MIXED) as target:
        for incarnation in range(2 * prefixes._MOST_AVOIDED):
            target.prefixes._avoid(types_pb2.KVSource(incarnation=incarnation))
        assert len(target.prefixes._avoided_until_s) == prefixes._MOST_AVOIDED
        ids = await alone(source, router)
        assert await first_of(target, router, prefix_source=source.source()) == (CACHED, ids[0])
