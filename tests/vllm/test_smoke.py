"""Tests what a worker with vLLM is for, quickly: two real engines behind workers and a router, on a tiny model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.v1 import inference_pb2, types_pb2
from services.vllm.engine import VllmEngine
from tests.support.cluster import greedy_request, receive_several, running_cluster
from tests.support.equality import GreedyReference
from tests.support.streams import Job
from tests.support.vllm_driver import BLOCK, load, tiny_for_vllm
from tests.support.workers import DECODE, PREFILL, until

pytestmark = pytest.mark.timeout(400)

WORKER = {"block_size": BLOCK, "kv_blocks": 96, "max_num_batched_tokens": 128, "max_model_len": 2048}


async def test_streams_are_those_of_the_model_and_leave_nothing(tmp_path: Path) -> None:
    model = tiny_for_vllm(tmp_path, num_hidden_layers=4)
    reference = GreedyReference(model)
    rng_prompts = [tuple((at * 37 + length) % 300 + 3 for at in range(length)) for length in (1, 31, 32, 33, 701)]
    jobs = [Job(prompt, 20) for prompt in rng_prompts] + [Job(rng_prompts[3], 20, seed=4, cache_salt="seeded")]
    async with running_cluster(model, [PREFILL, DECODE], load=load, **WORKER) as cluster:
        answers = await asyncio.gather(*(cluster.stream(job.request()) for job in jobs))
        for job, answer in zip(jobs, answers, strict=True):
            job.check(reference, answer)
            assert answer.completion is not None
            assert (answer.completion.workers.prefill, answer.completion.workers.decode) == ("w0", "w1")

        again = await cluster.stream(jobs[4].request())  # from the prefix caches
        jobs[4].check(reference, again)

        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=rng_prompts[3]),
            sampling=types_pb2.SamplingParams(temperature=1.0, seed=4),
            stopping=types_pb2.StoppingParams(max_tokens=12, ignore_eos=True),
            response=inference_pb2.ResponseOptions(logprobs=2),
            n=3,
        )
        several = await receive_several(cluster.inference.GenerateStream(request, timeout=120.0), 3)
        assert all(len(each.token_ids) == 12 for each in several)
        assert all(len(each.logprobs) == 12 for each in several)
        assert len({tuple(each.token_ids) for each in several}) == 3

        cancelled = cluster.inference.GenerateStream(greedy_request(rng_prompts[4], 1000))
        async for message in cancelled:
            if message.HasField("chunk"):
                break
        cancelled.cancel()
        await cluster.idle()
        for worker in cluster.workers:
            engine = worker.engine
            assert isinstance(engine, VllmEngine)
            await until(lambda each=engine: each.usage == 0.0, "vLLM has all its blocks")
