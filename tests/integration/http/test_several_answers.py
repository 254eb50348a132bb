"""Tests `n` over HTTP with OpenAI's own client: the index of a choice is prompt x n + answer, whole and streamed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import openai
import pytest

from services.core.seeds import answer_seed
from tests.support.cluster import Cluster
from tests.support.http_client import openai_client

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED: dict[str, Any] = {
    **{"model": "tiny-llama", "seed": 7, "temperature": 0.9, "max_tokens": 12},
    "extra_body": {"ignore_eos": True},
}
PROMPTS = ["The baton is passed", "A lease"]
CHAT: list[Any] = [{"role": "user", "content": "pass the baton"}]


async def test_each_choice_is_that_of_a_request_of_its_own(cluster: Cluster) -> None:
    async with openai_client(cluster) as client:
        together = await client.completions.create(prompt=PROMPTS, n=3, **ASKED)
        assert [choice.index for choice in together.choices] == list(range(6))
        assert len({choice.text for choice in together.choices}) == 6
        singles = [
            await client.completions.create(prompt=prompt, **{**ASKED, "seed": answer_seed(7, index)})
            for prompt in PROMPTS
            for index in range(3)
        ]
        assert [choice.text for choice in together.choices] == [single.choices[0].text for single in singles]
        assert together.usage is not None
        assert together.usage.completion_tokens == 6 * 12
        first, second = singles[0].usage, singles[3].usage
        assert first is not None
        assert second is not None
        assert together.usage.prompt_tokens == first.prompt_tokens + second.prompt_tokens, "each prompt counts once"
    await cluster.idle()


async def test_a_stream_has_the_same_choices(cluster: Cluster) -> None:
    async with openai_client(cluster) as client:
        whole = await client.completions.create(prompt=PROMPTS, n=2, **ASKED)
        texts, ends = dict.fromkeys(range(4), ""), Counter[int]()
        stream = await client.completions.create(
            prompt=PROMPTS, n=2, stream=True, stream_options={"include_usage": True}, **ASKED
        )
        usage = None
        async for chunk in stream:
            for choice in chunk.choices:
                assert not ends[choice.index], "nothing comes after its end"
                texts[choice.index] += choice.text
                ends[choice.index] += choice.finish_reason is not None
            usage = chunk.usage or usage
        assert list(texts.values()) == [choice.text for choice in whole.choices]
        assert ends == dict.fromkeys(range(4), 1)
        assert usage == whole.usage
    await cluster.idle()


async def test_chats_have_them_too(cluster: Cluster) -> None:
    async with openai_client(cluster) as client:
        whole = await client.chat.completions.create(messages=CHAT, n=3, logprobs=True, **ASKED)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        assert all(choice.logprobs is not None for choice in whole.choices)
        texts = dict.fromkeys(range(3), "")
        roles = Counter[int]()
        async for chunk in await client.chat.completions.create(messages=CHAT, n=3, stream=True, **ASKED):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index] += choice.delta.role is not None
        assert list(texts.values()) == [choice.message.content for choice in whole.choices]
        assert roles == dict.fromkeys(range(3), 1), "each begins once"
    await cluster.idle()


@pytest.mark.parametrize("wrong", [{"n": 0}, {"n": 17}, {"n": 2, "extra_body": {"best_of": 5}}])
async def test_other_numbers_are_refused_by_name(cluster: Cluster, wrong: dict[str, Any]) -> None:
    async with openai_client(cluster) as client:
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.completions.create(model="tiny-llama", prompt="x", **wrong)
        assert refusal.value.param in ("n", "best_of")
