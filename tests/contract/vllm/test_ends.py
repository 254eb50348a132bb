"""Tests `VllmEngine` behind workers where sequences end early: they are cancelled or too late in each phase, vLLM takes
their blocks, a load fails, a request is refused. Afterwards nothing is held, and what is said is right."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from baton.v1 import inference_pb2, types_pb2, worker_pb2
from services.vllm.engine import VllmEngine
from tests.support.cluster import Cluster, greedy_request, running_cluster
from tests.support.patience import HANG_S, Patience
from tests.support.scripted_memory import script
from tests.support.scripted_vllm_engine import VOCAB_SIZE, ScriptedVllm
from tests.support.workers import (
    DECODE,
    MIXED,
    PREFILL,
    Roles,
    ScriptedRouter,
    idle,
    prefill_command,
    running_worker,
    until,
    worker_config,
)

pytestmark = pytest.mark.process

PROMPT = [5 + i * i % 250 for i in range(200)]
NUM_TOKENS = 12
SPLIT = [PREFILL, DECODE]
PHASES = ["hold-prefill", "hold-load", "hold-decode"]


def said(prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    return script(prompt, num_tokens, VOCAB_SIZE)


def engine_of(cluster: Cluster, number: int) -> VllmEngine:
    engine = cluster.workers[number].engine
    assert isinstance(engine, VllmEngine)
    return engine


async def held(vllm: ScriptedVllm, name: str) -> None:
    await until(lambda: vllm.controls.is_held(name), f"{name} is reached")


async def goes_on(cluster: Cluster) -> None:
    """Asserts that nothing is held, and that the same prompt and another are answered."""
    await cluster.idle()
    for prompt in (PROMPT, PROMPT[3:]):
        assert (await cluster.greedy(prompt, NUM_TOKENS)).token_ids == said(prompt)


@pytest.mark.parametrize("phase", PHASES)
async def test_cancelled(model: Path, vllm: ScriptedVllm, phase: str) -> None:
    async with running_cluster(model, SPLIT, load=vllm.load) as cluster:
        engine = engine_of(cluster, int(phase != "hold-prefill"))
        with vllm.controls.held(phase):
            call = cluster.inference.GenerateStream(greedy_request(PROMPT, NUM_TOKENS))
            await held(vllm, phase)
            call.cancel()
            assert await call.code() is grpc.StatusCode.CANCELLED
            await until(lambda: not any(worker.num_legs for worker in cluster.workers), "no leg is left")
            assert engine.stats().ledger.active, "what runs may still touch the sequence's slots"
            assert not engine.stats().num_running
        await goes_on(cluster)


@pytest.mark.parametrize("phase", PHASES)
async def test_too_late(model: Path, vllm: ScriptedVllm, phase: str) -> None:
    async with running_cluster(model, SPLIT, load=vllm.load) as cluster:
        with vllm.controls.held(phase):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.stream(greedy_request(PROMPT, NUM_TOKENS), timeout_s=0.5)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert vllm.controls.is_held(phase)
        await goes_on(cluster)


@pytest.mark.parametrize("roles", [SPLIT, [MIXED], [DECODE]], ids=["split", "adopted", "whole"])
@pytest.mark.parametrize("order", ["hold-gone", "hold-output"])
async def test_the_last_token_and_the_end_of_the_last_step_come_in_any_order(
    model: Path, vllm: ScriptedVllm, roles: list[Roles], order: str
) -> None:
    async with running_cluster(model, roles, load=vllm.load) as cluster:
        for _ in range(2):
            vllm.controls.set(order)
            answer = asyncio.create_task(cluster.greedy(PROMPT, NUM_TOKENS))
            patience = Patience(HANG_S)
            while not answer.done():
                assert not patience.is_over()
                if vllm.controls.is_held(order):
                    await asyncio.sleep(0.03)  # the other one comes meanwhile
                    vllm.controls.clear(order)
                    await until(lambda: not vllm.controls.is_held(order), "it goes on")
                    vllm.controls.set(order)
                await asyncio.sleep(0.002)
            vllm.controls.clear(order)
            assert answer.result().token_ids == said(PROMPT)
            await cluster.idle()


async def test_cancelled_between_its_last_step_and_its_last_token(model: Path, vllm: ScriptedVllm) -> None:
    """Its slots are free when vLLM is told to drop it, and are not freed again."""
    async with running_cluster(model, [DECODE], load=vllm.load) as cluster:
        with vllm.controls.held("hold-output"):
            call = cluster.inference.GenerateStream(greedy_request(PROMPT, NUM_TOKENS))
            await held(vllm, "hold-output")
            await until(lambda: engine_of(cluster, 0).stats().ledger.idle, "no step touches its slots")
            assert engine_of(cluster, 0).stats().num_running
            call.cancel()
            assert await call.code() is grpc.StatusCode.CANCELLED
            await until(lambda: not engine_of(cluster, 0).stats().num_running, "it is dropped")
        await goes_on(cluster)


@pytest.mark.parametrize("roles", [SPLIT, [MIXED], [DECODE]], ids=["split", "adopted", "whole"])
async def test_one_whose_blocks_vllm_takes_is_replayed(model: Path, vllm: ScriptedVllm, roles: list[Roles]) -> None:
    async with running_cluster(model, roles, load=vllm.load) as cluster:
        with vllm.controls.held("hold-decode"):
            answer = asyncio.create_task(cluster.greedy(PROMPT, NUM_TOKENS))
            await held(vllm, "hold-decode")
            vllm.controls.set("preempt")
        assert (await answer).token_ids == said(PROMPT)
        completion = answer.result().completion
        assert completion is not None
        assert completion.workers.retries == 1
        assert not vllm.controls.is_set("preempt")
        await goes_on(cluster)


@pytest.mark.parametrize("roles", [SPLIT, [MIXED], [DECODE]], ids=["split", "adopted", "whole"])
async def test_a_failed_load_gives_no_wrong_token(model: Path, vllm: ScriptedVllm, roles: list[Roles]) -> None:
    async with running_cluster(model, roles, load=vllm.load) as cluster:
        await cluster.greedy(PROMPT, 2)  # so that a prefix is loaded
        vllm.controls.set("fail-load")
        assert (await cluster.greedy(PROMPT, NUM_TOKENS)).token_ids == said(PROMPT), "it is replayed"
        assert not vllm.controls.is_set("fail-load")
        await goes_on(cluster)


async def test_a_request_that_vllm_refuses(model: Path, vllm: ScriptedVllm) -> None:
    """No other worker would take it, so none is tried, and this one is not blamed."""
    async with running_cluster(model, [DECODE], load=vllm.load) as cluster:
        with (
            vllm.controls.held("refuse"),
            pytest.raises(grpc.aio.AioRpcError, match="ValueError: it is refused") as got,
        ):
            await cluster.greedy(PROMPT, NUM_TOKENS)
        assert got.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert cluster.num_ready == 1
        await goes_on(cluster)


@pytest.mark.parametrize("roles", [SPLIT, [DECODE]], ids=["split", "whole"])
async def test_what_it_has_not_is_refused_by_name(model: Path, vllm: ScriptedVllm, roles: list[Roles]) -> None:
    constraint = types_pb2.Constraint(regex="a*")
    scored = inference_pb2.ResponseOptions(prompt_logprobs=0)
    async with running_cluster(model, roles, load=vllm.load) as cluster:
        for fields, why in (({"constraint": constraint}, "no masks"), ({"response": scored}, "of prompts")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.stream(greedy_request(PROMPT, NUM_TOKENS, **fields))
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert why in str(caught.value.details())
        await goes_on(cluster)


async def test_a_prompt_that_does_not_fit_now_waits(model: Path, vllm: ScriptedVllm) -> None:
    prompts = [PROMPT[each : each + 150] for each in range(4)]
    async with running_cluster(model, [MIXED], load=vllm.load, kv_blocks=20) as cluster:
        answers = await asyncio.gather(*(cluster.greedy(prompt, NUM_TOKENS) for prompt in prompts))
    assert [answer.token_ids for answer in answers] == [said(prompt) for prompt in prompts]


async def test_a_lease_holds_none_of_vllms_blocks(model: Path, vllm: ScriptedVllm) -> None:
    router = ScriptedRouter()
    config = worker_config(model, kv_blocks=20)
    async with running_worker(config, PREFILL, load=vllm.load) as host, router.session(host) as session:
        engine = host.engine
        assert isinstance(engine, VllmEngine)
        leg, waiting = router.new_leg(), router.new_leg()
        await session.send(prefill=prefill_command(leg, PROMPT))
        assert (await session.tokens(leg, count=1))[0] == said(PROMPT, 1)
        await until(lambda: engine.stats().ledger.leased == 13 and not engine.usage, "vLLM's blocks are free")
        await session.send(prefill=prefill_command(waiting, PROMPT[3:]))
        await asyncio.sleep(0.05)
        assert engine.stats().num_waiting == 1, "the slots do not suffice for both"
        await session.send(cancel=worker_pb2.CancelLeg(leg=leg))
        assert (await session.tokens(waiting, count=1))[0] == said(PROMPT[3:], 1)
        await session.send(cancel=worker_pb2.CancelLeg(leg=waiting))
        await idle(host)
