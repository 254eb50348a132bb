"""Tests workers and a router over `VllmEngine` with a vLLM that follows a script: every way gives the right tokens, and
afterwards nothing is held."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.v1 import inference_pb2, types_pb2
from services.kv.pool import Ledger
from services.worker.host import WorkerHost
from tests.support.cluster import Answer, Cluster, receive_several, running_cluster
from tests.support.scripted_memory import script
from tests.support.scripted_ranks import logprob_of
from tests.support.scripted_vllm_engine import VOCAB_SIZE, ScriptedVllm
from tests.support.workers import DECODE, MIXED, PREFILL, Roles, until

pytestmark = pytest.mark.process

_MANY = [5 + i * i % 250 for i in range(400)]
PROMPT = _MANY[:200]
NUM_TOKENS = 12
LENGTHS = (1, 15, 16, 17, 64, 200)
"""Around a block of 16 tokens, and of one step and more of 64."""
WAYS = {
    "split-shm": ([PREFILL, DECODE], "shm", types_pb2.TRANSPORT_SHM),
    "split-grpc": ([PREFILL, DECODE], "grpc", types_pb2.TRANSPORT_GRPC),
    "split-tcp": ([PREFILL, DECODE], "tcp", types_pb2.TRANSPORT_TCP),
    "adopted": ([MIXED], "auto", types_pb2.TRANSPORT_LOCAL),
    "whole": ([DECODE], "auto", types_pb2.TRANSPORT_UNSPECIFIED),
}
SPLIT = [PREFILL, DECODE]


def said(prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    return script(prompt, num_tokens, VOCAB_SIZE)


def timings(answer: Answer) -> types_pb2.PhaseTimings:
    assert answer.completion is not None
    return answer.completion.timings


@pytest.mark.parametrize("way", WAYS)
async def test_every_way_gives_the_script(model: Path, vllm: ScriptedVllm, way: str) -> None:
    roles, pulls_by, transport = WAYS[way]
    async with running_cluster(model, roles, load=vllm.load, transport=pulls_by) as cluster:
        for length in LENGTHS:
            prompt = _MANY[length : 2 * length]  # nothing is in a prefix cache
            answer = await cluster.greedy(prompt, NUM_TOKENS)
            assert answer.token_ids == said(prompt), length
            assert timings(answer).transport == transport
            assert timings(answer).transfer_blocks == (-(-length // 16) if transport else 0)


@pytest.mark.parametrize("roles", [SPLIT, [MIXED]], ids=["split", "mixed"])
async def test_many_at_once(model: Path, vllm: ScriptedVllm, roles: list[Roles]) -> None:
    prompts = [[each + 5, *PROMPT[: 7 * each]] for each in range(20)]
    async with running_cluster(model, roles, load=vllm.load, max_num_seqs=8) as cluster:
        answers = await asyncio.gather(*(cluster.greedy(prompt, NUM_TOKENS) for prompt in prompts))
    assert [answer.token_ids for answer in answers] == [said(prompt) for prompt in prompts]


async def test_a_mixed_worker_that_has_no_room_for_all_outputs_loses_none(model: Path, vllm: ScriptedVllm) -> None:
    """What it adopts of its own prompts waits until others have ended."""
    prompts = [[each + 5, *PROMPT[: 7 * each]] for each in range(12)]
    async with running_cluster(model, [MIXED], load=vllm.load, max_num_seqs=8, kv_blocks=40) as cluster:
        answers = await asyncio.gather(*(cluster.greedy(prompt, 200) for prompt in prompts))
        assert not cluster.workers[0].tally.internal_errors
    assert [answer.token_ids for answer in answers] == [said(prompt, 200) for prompt in prompts]


async def test_the_slots_are_a_prefix_cache_on_both_sides(model: Path, vllm: ScriptedVllm) -> None:
    async with running_cluster(model, SPLIT, load=vllm.load) as cluster:
        for length in (100, 100, 96, 130):
            answer = await cluster.greedy(PROMPT[:length], NUM_TOKENS)
            assert answer.token_ids == said(PROMPT[:length])
        assert answer.prompt_info is not None
        assert answer.completion is not None
        assert answer.completion.usage.cached_tokens == 96, "6 blocks of the first"
        assert timings(answer).transfer_blocks == 3, "those are in the decode worker's slots too"


async def test_two_ranks_have_halves_of_a_block(model: Path, tmp_path: Path) -> None:
    two = ScriptedVllm(tmp_path, tensor_parallel_size="2")
    async with running_cluster(model, SPLIT, load=two.load) as cluster:
        for length in LENGTHS:
            answer = await cluster.greedy(PROMPT[:length], NUM_TOKENS)
            assert answer.token_ids == said(PROMPT[:length])
        assert timings(answer).transport == types_pb2.TRANSPORT_SHM


async def test_a_block_is_final_when_every_rank_has_saved_it(model: Path, tmp_path: Path) -> None:
    two = ScriptedVllm(tmp_path, tensor_parallel_size="2")
    async with running_cluster(model, SPLIT, load=two.load) as cluster:
        with two.controls.held("hold-save"):
            answer = asyncio.create_task(cluster.greedy(PROMPT, NUM_TOKENS))
            await until(lambda: two.controls.is_held("hold-save"), "rank 1 waits")
            await asyncio.sleep(0.1)  # the other rank's is there
            assert not ledger(cluster.workers[0]).cached
            assert ledger(cluster.workers[0]).leased
        assert (await answer).token_ids == said(PROMPT)


async def test_several_answers(model: Path, vllm: ScriptedVllm) -> None:
    sampled = []
    for roles in (SPLIT, [MIXED], [DECODE]):
        async with running_cluster(model, roles, load=vllm.load) as cluster:
            assert [answer.token_ids for answer in await several(cluster, temperature=0.0)] == [said(PROMPT)] * 3
            sampled.append([answer.token_ids for answer in await several(cluster, temperature=1.0, seed=7)])
    assert sampled[0] == sampled[1] == sampled[2]
    assert len({tuple(answer) for answer in sampled[0]}) == 3, "each has noise of its own"


def ledger(worker: WorkerHost) -> Ledger:
    return worker.engine.stats().ledger


async def several(cluster: Cluster, **sampling: float) -> list[Answer]:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        sampling=types_pb2.SamplingParams(**sampling),
        stopping=types_pb2.StoppingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
        n=3,
    )
    return await receive_several(cluster.inference.GenerateStream(request, timeout=30.0), 3)


@pytest.mark.parametrize("way", ["split-shm", "whole"])
async def test_logprobs_are_the_samplers(model: Path, vllm: ScriptedVllm, way: str) -> None:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        sampling=types_pb2.SamplingParams(temperature=0.0),
        stopping=types_pb2.StoppingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
        response=inference_pb2.ResponseOptions(logprobs=2),
    )
    async with running_cluster(model, WAYS[way][0], load=vllm.load) as cluster:
        answer = await cluster.stream(request)
    assert answer.token_ids == said(PROMPT)
    assert [each.logprob for each in answer.logprobs] == pytest.approx([logprob_of(each) for each in said(PROMPT)])
    assert all(len(each.top) == 2 for each in answer.logprobs)


@pytest.mark.parametrize("way", ["split-shm", "adopted", "whole"])
async def test_what_ends_an_answer(model: Path, vllm: ScriptedVllm, way: str) -> None:
    whole = said(PROMPT)
    async with running_cluster(model, WAYS[way][0], load=vllm.load) as cluster:
        for at in (0, 1, 5):
            answer = await stopped(cluster, whole[at])
            assert answer.token_ids == whole[: at + 1][: len(answer.token_ids)], "the stop token may be cut off"
            assert answer.completion is not None
            assert answer.completion.finish_reason == types_pb2.FINISH_REASON_STOP
            assert len(answer.token_ids) in (at, at + 1)
        kept = await stopped(cluster, whole[2], min_tokens=5)
        assert kept.token_ids[:2] == whole[:2]
        assert whole[2] not in kept.token_ids[:5], "it may not be sampled before"
        assert (await cluster.greedy(PROMPT, 1)).token_ids == whole[:1]
        assert (await cluster.greedy(PROMPT, 2)).token_ids == whole[:2]
        context = await cluster.greedy(PROMPT[:20], 492)
        assert len(context.token_ids) == 492, "the model has 512 positions"


async def stopped(cluster: Cluster, token_id: int, min_tokens: int = 0) -> Answer:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        sampling=types_pb2.SamplingParams(temperature=0.0),
        stopping=types_pb2.StoppingParams(
            max_tokens=NUM_TOKENS, min_tokens=min_tokens, stop_token_ids=[token_id], ignore_eos=True
        ),
    )
    return await cluster.stream(request)
