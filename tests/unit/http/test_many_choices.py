"""Tests whole answers of many choices: they are written in turns with all else on the event loop, and their memory is
charged."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import Overloaded
from services.router.front.call import ByteBudget
from services.router.front.http import completions
from services.router.front.http.answers import HttpCall, TokenTexts
from services.router.front.http.body import Body
from services.router.front.http.reply import Reply
from tests.support.text_model import byte_tokenizer

NUM_PROMPTS, NUM_ANSWERS, NUM_TOKENS, NUM_TOP = 16, 16, 16, 20
NUM_THOUGHT = 3
TOP = [types_pb2.TopLogprob(token_id=token_id, logprob=-float(token_id)) for token_id in range(5, 5 + NUM_TOP)]


@pytest.fixture(scope="module")
def texts() -> TokenTexts:
    return TokenTexts(byte_tokenizer())


def asked(texts: TokenTexts) -> HttpCall:
    fields = {"prompt": ["hi"] * NUM_PROMPTS, "n": NUM_ANSWERS, "logprobs": NUM_TOP, "max_tokens": NUM_TOKENS}
    return completions.read_call(Body(fields), texts)


async def answered(call: HttpCall) -> bytes:
    """Returns the body of what is written when all answers of all prompts end at once."""
    body = b""

    async def send(message: Any) -> None:
        nonlocal body
        body += message.get("body", b"")

    writer: Any = call.writer("id", "model", Reply(send))
    entries = [types_pb2.TokenLogprobs(logprob=-1.0, top=TOP)] * NUM_TOKENS

    async def prompt(index: int) -> None:
        for answer in range(NUM_ANSWERS):
            text = f"{index}.{answer}"
            chunk = inference_pb2.Chunk(index=answer, text=text, token_ids=[5] * NUM_TOKENS, logprobs=entries)
            await writer.take(index, chunk)
            usage = inference_pb2.Usage(
                prompt_tokens=0 if answer else 2, output_tokens=NUM_TOKENS, reasoning_tokens=NUM_THOUGHT
            )
            reason = types_pb2.FINISH_REASON_LENGTH
            await writer.take(index, inference_pb2.Completion(index=answer, finish_reason=reason, usage=usage))

    await asyncio.gather(*map(prompt, range(NUM_PROMPTS)))
    return body


async def test_they_are_written_in_turns_and_in_order(texts: TokenTexts) -> None:
    num_turns = 0

    async def watch() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    call = asked(texts)
    watching = asyncio.create_task(watch())
    answer = json.loads(await answered(call))
    watching.cancel()
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(NUM_PROMPTS * NUM_ANSWERS))
    assert [choice["text"] for choice in choices[14:18]] == ["0.14", "0.15", "1.0", "1.1"]
    assert all(len(choice["logprobs"]["token_logprobs"]) == NUM_TOKENS for choice in choices)
    assert answer["usage"]["prompt_tokens"] == 2 * NUM_PROMPTS
    assert answer["usage"]["completion_tokens"] == NUM_PROMPTS * NUM_ANSWERS * NUM_TOKENS
    thought = {"reasoning_tokens": NUM_PROMPTS * NUM_ANSWERS * NUM_THOUGHT}
    assert answer["usage"]["completion_tokens_details"] == thought
    assert num_turns > NUM_PROMPTS * NUM_ANSWERS, "all else has a turn after each"


async def test_what_is_kept_is_charged(texts: TokenTexts) -> None:
    budget, call = ByteBudget(1 << 30), asked(texts)
    for prompt in call.prompts:
        prompt.incoming.charge = budget.charge()
    body = await answered(call)
    assert len(body) * 0.9 < budget.used_bytes < len(body) * 1.1

    small, call = ByteBudget(len(body) // 2), asked(texts)
    for prompt in call.prompts:
        prompt.incoming.charge = small.charge()
    with pytest.raises(Overloaded):
        await answered(call)
