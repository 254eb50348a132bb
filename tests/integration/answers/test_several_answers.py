"""Tests requests for several answers: each is what a request of its own gets, split or not; they share one prompt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import WorkerFailed
from services.core.seeds import answer_seed
from tests.support.cluster import Answer, Cluster, receive, receive_several, running_cluster
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.workers import DECODE, MIXED, PREFILL, pools_that_cannot_be_mapped, until

MAX_TOKENS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("several"))


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(model, [PREFILL, DECODE]) as running:
        yield running


def request_for(length: int, num_answers: int, **sampling: Any) -> inference_pb2.GenerateRequest:
    prompt = random.Random(length).choices(range(3, VOCAB_SIZE), k=length)
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=types_pb2.SamplingParams(**{"temperature": 1.0, "seed": 11, **sampling}),
        stopping=types_pb2.StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
        n=num_answers,
    )


async def answers_of(cluster: Cluster, request: inference_pb2.GenerateRequest) -> list[Answer]:
    return await receive_several(cluster.inference.GenerateStream(request, timeout=60.0), request.n)


async def alone(cluster: Cluster, request: inference_pb2.GenerateRequest, index: int) -> Answer:
    """Returns the answer to a request of its own, with the seed that the one of that index has."""
    single = inference_pb2.GenerateRequest()
    single.CopyFrom(request)
    single.ClearField("n")
    single.sampling.seed = answer_seed(request.sampling.seed, index)
    return await receive(cluster.inference.GenerateStream(single, timeout=60.0))


# Around the edges of a block: of 16 nothing is copied, and of 1 nothing is shared.
@pytest.mark.parametrize("length", [1, 16, 21])
async def test_each_answer_is_that_of_a_request_of_its_own(cluster: Cluster, length: int) -> None:
    request = request_for(length, 3, frequency_penalty=0.5)
    found = await answers_of(cluster, request)
    singles = [await alone(cluster, request, index) for index in range(3)]
    assert [answer.token_ids for answer in found] == [single.token_ids for single in singles]
    assert [answer.text for answer in found] == [single.text for single in singles]
    assert len({tuple(answer.token_ids) for answer in found}) == 3
    workers = {(done.workers.prefill, done.workers.decode) for done in map(_completion, found)}
    assert workers == {("w0", "w1")}
    await cluster.idle()


async def test_the_prompt_counts_once_and_is_computed_once(cluster: Cluster) -> None:
    before = cluster.workers[0].engine.tally.prefill_tokens
    found = await answers_of(cluster, request_for(40, 4))
    usages = [_completion(answer).usage for answer in found]
    assert [usage.prompt_tokens for usage in usages] == [40, 0, 0, 0]
    assert [usage.output_tokens for usage in usages] == [MAX_TOKENS] * 4
    assert cluster.workers[0].engine.tally.prefill_tokens - before == 40
    await cluster.idle()


async def test_whole_answers_are_those_of_the_stream(cluster: Cluster) -> None:
    request = request_for(20, 3)
    request.response.logprobs = 2
    found = await answers_of(cluster, request)
    whole = await cluster.inference.Generate(request)
    outputs = [whole.output, *(each.output for each in whole.further)]
    assert [list(output.token_ids) for output in outputs] == [answer.token_ids for answer in found]
    assert [len(output.logprobs) for output in outputs] == [MAX_TOKENS] * 3
    assert [output.index for output in outputs] == [0, 1, 2]
    assert [each.completion.index for each in whole.further] == [1, 2]


async def test_a_stop_string_ends_its_answer_only(cluster: Cluster) -> None:
    request = request_for(20, 3)
    free = await answers_of(cluster, request)
    # A text that only the second one has.
    stop = next(
        free[1].text[at : at + 3]
        for at in range(len(free[1].text) - 2)
        if all(free[1].text[at : at + 3] not in other.text for other in (free[0], free[2]))
    )
    request.stopping.stop.append(stop)
    found = await answers_of(cluster, request)
    assert [_completion(answer).stop_string for answer in found] == ["", stop, ""]
    assert found[1].text == free[1].text[: free[1].text.index(stop)]
    assert [found[0].token_ids, found[2].token_ids] == [free[0].token_ids, free[2].token_ids]
    await cluster.idle()


async def test_each_answer_has_an_end_of_its_own(cluster: Cluster) -> None:
    request = request_for(20, 3)
    free = await answers_of(cluster, request)
    stop = free[1].token_ids[0]
    assert stop not in free[0].token_ids + free[2].token_ids, "choose another seed"
    request.stopping.stop_token_ids.append(stop)
    found = await answers_of(cluster, request)
    assert found[1].token_ids == [stop], "token 0 ends it before there is a handoff"
    assert _completion(found[1]).finish_reason == types_pb2.FINISH_REASON_STOP
    assert [found[0].token_ids, found[2].token_ids] == [free[0].token_ids, free[2].token_ids]
    await cluster.idle()


async def test_first_tokens_may_be_all_there_is(cluster: Cluster) -> None:
    request = request_for(20, 4)
    request.stopping.max_tokens = 1
    found = await answers_of(cluster, request)
    assert [len(answer.token_ids) for answer in found] == [1] * 4
    await cluster.idle()


async def test_a_client_that_leaves_ends_all_of_them(cluster: Cluster) -> None:
    request = request_for(20, 4)
    request.stopping.max_tokens = 500
    call = cluster.inference.GenerateStream(request, timeout=60.0)
    async for message in call:
        if message.HasField("chunk"):
            break
    call.cancel()
    await cluster.idle()


async def test_more_than_sixteen_are_refused(cluster: Cluster) -> None:
    for wrong in (0, 17):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await cluster.inference.Generate(request_for(4, wrong))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "n: " in (refusal.value.details() or "") or " n " in (refusal.value.details() or "")


@pytest.mark.parametrize("roles", [[MIXED], [DECODE]])
async def test_unsplit_answers_are_the_same(model: Path, cluster: Cluster, roles: list[Any]) -> None:
    request = request_for(37, 3)
    found = await answers_of(cluster, request)
    async with running_cluster(model, roles) as unsplit:
        assert [each.token_ids for each in await answers_of(unsplit, request)] == [each.token_ids for each in found]


async def test_answers_that_do_not_fit_together_take_turns(model: Path, cluster: Cluster) -> None:
    """Neither the batch nor the pool holds all of them: some are preempted, and wait."""
    request = request_for(40, 6)
    request.stopping.max_tokens = 40
    expected = await answers_of(cluster, request)
    async with running_cluster(model, [PREFILL, DECODE], kv_blocks=9, max_num_seqs=4) as small:
        found, again = await asyncio.gather(answers_of(small, request), answers_of(small, request))
        assert small.workers[1].engine.stats().num_preemptions > 0
    for each in (found, again):
        assert [answer.token_ids for answer in each] == [answer.token_ids for answer in expected]


async def test_staged_pools_hand_over_for_all(model: Path, cluster: Cluster) -> None:
    request = request_for(70, 3)
    expected = await answers_of(cluster, request)
    with pools_that_cannot_be_mapped():
        async with running_cluster(model, [PREFILL, DECODE]) as staged:
            found = await answers_of(staged, request)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]


async def test_a_lost_decode_worker_costs_no_token(model: Path, cluster: Cluster) -> None:
    """Each answer that is not complete is computed again by itself, with the noise that it had."""
    request = request_for(33, 4)
    request.stopping.max_tokens = 60
    expected = await answers_of(cluster, request)
    async with running_cluster(model, [PREFILL, DECODE, DECODE]) as faulty:
        running = asyncio.create_task(answers_of(faulty, request))

        def busy() -> list[Any]:
            return [worker for worker in faulty.workers[1:] if worker.engine.stats().num_running == 4]

        await until(lambda: bool(busy()), "all four decode")
        busy()[0].fail(WorkerFailed("no steps any more"))
        found = await running
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
        assert all(_completion(answer).workers.retries >= 1 for answer in found)


def _completion(answer: Answer) -> inference_pb2.Completion:
    assert answer.completion is not None
    return answer.completion
