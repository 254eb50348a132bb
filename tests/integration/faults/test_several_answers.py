"""Tests workers that are killed while they make several answers to each prompt: every answer is the one that no fault
would have given, and nothing is left held."""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.v1 import inference_pb2, types_pb2
from services.core.seeds import answer_seed
from tests.support.cluster import Answer, receive_several
from tests.support.equality import GreedyReference
from tests.support.models import VOCAB_SIZE
from tests.support.phases import Phase, decoding, handing_over, prefilling, reach, strike
from tests.support.real_cluster import RealCluster, RouterClient
from tests.support.streams import Streams

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]

NUM_ANSWERS = 3
_RANDOM = random.Random(2)


class SeveralStreams(Streams):
    """Requests for several answers under way, as many as keep the workers busy."""

    def __init__(self, router: RouterClient, num_requests: int) -> None:
        super().__init__(router, ())
        self.requests = [_request() for _ in range(num_requests)]
        self.several = [
            asyncio.create_task(receive_several(router.inference.GenerateStream(request, timeout=600.0), NUM_ANSWERS))
            for request in self.requests
        ]
        self.tasks = list(self.several)  # type: ignore[arg-type]

    async def check(self, reference: GreedyReference) -> int:
        """Waits for all and checks each answer. Returns how often a request, or a part of one, was placed again."""
        num_retries = 0
        for request, answers in zip(self.requests, await asyncio.gather(*self.several), strict=True):
            for index, answer in enumerate(answers):
                _check(reference, request, index, answer)
                assert answer.completion is not None
                num_retries += answer.completion.workers.retries
        return num_retries


def _request() -> inference_pb2.GenerateRequest:
    prompt = _RANDOM.choices(range(3, VOCAB_SIZE), k=_RANDOM.randrange(100, 400))
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=types_pb2.SamplingParams(temperature=1.0, seed=_RANDOM.getrandbits(63)),
        stopping=types_pb2.StoppingParams(max_tokens=_RANDOM.randrange(40, 80), ignore_eos=True),
        n=NUM_ANSWERS,
    )


def _check(reference: GreedyReference, request: inference_pb2.GenerateRequest, index: int, answer: Answer) -> None:
    assert len(answer.token_ids) == request.stopping.max_tokens
    seed = answer_seed(request.sampling.seed, index)
    reference.check_at_once(request.token_ids.ids, answer.token_ids, seed=seed)


@pytest.mark.parametrize("phase", [prefilling, handing_over, decoding])
async def test_killed(cluster: RealCluster, reference: GreedyReference, phase: Phase) -> None:
    async def attempt() -> bool:
        running = SeveralStreams(cluster.routers[0], 8)
        try:
            await cluster.restart(await reach(cluster, phase, running))
        finally:
            num_retries = await running.check(reference)
        return num_retries > 0

    await strike(attempt)
