"""Tests what one request may ask for, seen by a client of a split cluster: sampling, stops, log-probabilities,
templates."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from baton.v1 import inference_pb2, types_pb2
from tests.support.cluster import Answer, Cluster, greedy_request, running_cluster
from tests.support.models import EOS_TOKEN_ID, tiny_model
from tests.support.workers import DECODE, PREFILL

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(10, 60))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model: Path = tiny_model("llama", tmp_path_factory.mktemp("requests"))
    async with running_cluster(model, [PREFILL, DECODE], kv_blocks=400) as cluster:
        yield cluster


def sampled(seed: int, prompt: list[int] = PROMPT, max_tokens: int = 24, **params: Any) -> Any:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=types_pb2.SamplingParams(**{"temperature": 0.9, "seed": seed, **params}),
        stopping=types_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


async def test_seeded_sampling_repeats_itself_alone_and_in_a_batch(cluster: Cluster) -> None:
    alone = [await cluster.stream(sampled(seed)) for seed in range(4)]
    batch = await asyncio.gather(*(cluster.stream(sampled(seed % 4)) for seed in range(16)))
    for number, answer in enumerate(batch):
        assert answer.token_ids == alone[number % 4].token_ids
    assert len({tuple(answer.token_ids) for answer in alone}) == 4, "different seeds differ"


async def test_every_sampling_parameter_crosses_the_wire(cluster: Cluster) -> None:
    plain = await cluster.stream(sampled(1))
    for params in (
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 1.0},
        {"temperature": 0.0},
    ):
        # Each of these leaves only the likeliest token.
        assert (await cluster.stream(sampled(1, **params))).token_ids == (await cluster.greedy(PROMPT, 24)).token_ids
    forced = await cluster.stream(sampled(1, logit_bias=[types_pb2.LogitBias(token_id=77, bias=100.0)]))
    assert forced.token_ids == [77] * 24
    for params in ({"repetition_penalty": 50.0}, {"presence_penalty": 2.0, "frequency_penalty": 2.0}):
        penalised = await cluster.stream(sampled(1, temperature=0.0, **params))
        assert len(set(penalised.token_ids)) >= len(set((await cluster.greedy(PROMPT, 24)).token_ids))
    assert len(plain.token_ids) == 24


async def test_stop_tokens_and_min_tokens(cluster: Cluster) -> None:
    free = (await cluster.greedy(PROMPT, 24)).token_ids
    stop = free[5]
    first_at = free.index(stop)
    request = greedy_request(PROMPT, 24)
    request.stopping.stop_token_ids.append(stop)
    answer = await cluster.stream(request)
    assert answer.token_ids == free[: first_at + 1]
    assert answer.completion is not None
    assert answer.completion.finish_reason == types_pb2.FINISH_REASON_STOP
    assert answer.completion.stop_token_id == stop
    request.stopping.min_tokens = 15
    later = await cluster.stream(request)
    assert stop not in later.token_ids[:15]


async def test_the_models_own_end_of_sequence_stops_unless_ignored(cluster: Cluster) -> None:
    request = greedy_request(PROMPT, 24)
    request.sampling.logit_bias.add(token_id=EOS_TOKEN_ID, bias=100.0)
    ignored = await cluster.stream(request)
    assert ignored.token_ids == [EOS_TOKEN_ID] * 24
    request.stopping.ignore_eos = False
    stopped = await cluster.stream(request)
    assert stopped.token_ids == [EOS_TOKEN_ID]
    assert stopped.text == ""
    assert stopped.completion is not None
    assert stopped.completion.finish_reason == types_pb2.FINISH_REASON_STOP


async def test_stop_strings_cross_token_boundaries(cluster: Cluster) -> None:
    whole = await cluster.greedy(PROMPT, 40)
    assert len(whole.text) > 12
    stop = whole.text[5:9]
    request = greedy_request(PROMPT, 40)
    request.stopping.stop.append(stop)
    answer = await cluster.stream(request)
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.completion is not None
    assert answer.completion.finish_reason == types_pb2.FINISH_REASON_STOP
    assert answer.completion.stop_string == stop
    await cluster.idle()


async def test_logprobs(cluster: Cluster) -> None:
    request = greedy_request(PROMPT, 8)
    request.response.logprobs = 3
    answer = await cluster.stream(request)
    assert len(answer.logprobs) == 8
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert len(entry.top) == 3
        assert entry.top[0].token_id == token_id, "greedy takes the likeliest"
        assert entry.logprob == pytest.approx(entry.top[0].logprob)
        assert entry.top[0].logprob >= entry.top[1].logprob >= entry.top[2].logprob
        assert sum(math.exp(top.logprob) for top in entry.top) <= 1.0 + 1e-4


async def test_unary_equals_the_stream(cluster: Cluster) -> None:
    streamed = await cluster.greedy(PROMPT, 16)
    whole = await cluster.inference.Generate(greedy_request(PROMPT, 16))
    assert list(whole.output.token_ids) == streamed.token_ids
    assert whole.output.text == streamed.text
    assert whole.completion.usage.output_tokens == 16
    assert whole.completion.usage.prompt_tokens == len(PROMPT)
    assert whole.completion.workers.decode == "w1"


async def test_text_and_chat_prompts(cluster: Cluster) -> None:
    chat = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content="pass the baton")])
    request = greedy_request([], 8, response=inference_pb2.ResponseOptions(echo_token_ids=True))
    request.messages.CopyFrom(chat)
    by_messages = await cluster.stream(request)
    request.text = "<|im_start|>user\npass the baton<|im_end|>\n<|im_start|>assistant\n"
    by_text = await cluster.stream(request)
    assert by_messages.prompt_info is not None
    assert by_text.prompt_info is not None
    assert by_messages.prompt_info.token_ids == by_text.prompt_info.token_ids
    assert by_messages.token_ids == by_text.token_ids


async def test_default_max_tokens_is_what_the_context_leaves(cluster: Cluster) -> None:
    prompt = [7 + n % 200 for n in range(1000)]
    request = greedy_request(prompt, 1)
    request.stopping.ClearField("max_tokens")
    answer: Answer = await cluster.stream(request)
    assert len(answer.token_ids) == 24
    assert answer.completion is not None
    assert answer.completion.finish_reason == types_pb2.FINISH_REASON_LENGTH


async def test_a_salt_separates_prefix_caches(cluster: Cluster) -> None:
    prompt = [201 + n % 50 for n in range(64)]
    first = await cluster.greedy(prompt, 2, cache_salt="a")
    again = await cluster.greedy(prompt, 2, cache_salt="a")
    other = await cluster.greedy(prompt, 2, cache_salt="b")
    cached = [answer.prompt_info.cached_tokens for answer in (first, again, other) if answer.prompt_info]
    assert cached == [0, 48, 0]
    assert first.token_ids == again.token_ids == other.token_ids
