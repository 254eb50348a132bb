"""Tests HTTP under random bodies and headers: an answer, or an error that names its kind; never a 5xx, and nothing is
held.

`BATON_EXAMPLES=2000 pytest tests/integration/http/test_fuzz.py` draws more, from the same sequence.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import hypothesis.strategies as st
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, event, given, settings

from services.router.front.http.parameters import NOT_IN_CHAT, NOT_IN_COMPLETIONS
from services.router.front.http.responses.call import NOT_IN_RESPONSES
from tests.support.cluster import Cluster
from tests.support.examples import num_examples
from tests.support.http_client import TIMEOUTS, bare_client, events
from tests.support.models import VOCAB_SIZE

pytestmark = pytest.mark.asyncio(loop_scope="module")

ERRORS = {400, 404, 415}
GOOD: dict[str, Any] = {"prompt": [9] * 20, "max_tokens": 8, "temperature": 0, "ignore_eos": True}

NUMBERS = st.one_of(
    st.integers(-(1 << 70), 1 << 70), st.floats(), st.sampled_from([0, 1, -1, 1e-45, 2.0, 0.5, 1e39, 1e308])
)
TEXT = st.text(st.characters(), max_size=12)  # halves of surrogate pairs included
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
TOKEN_IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=50)
WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
PART = st.fixed_dictionaries({"type": st.just("text"), "text": WORDS})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user"]), "content": st.one_of(WORDS, st.lists(PART, max_size=2))},
    optional={"name": WORDS, "tool_calls": st.just([])},
)
STREAM_OPTIONS = st.fixed_dictionaries({"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()})
FIELDS: dict[str, Any] = {
    "model": st.just("tiny-llama"),
    "max_tokens": st.integers(4, 20),
    "min_tokens": st.integers(0, 4),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 400),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 2),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB_SIZE - 1).map(str), st.floats(-100, 100), max_size=3),
    "seed": st.integers(-(1 << 63), (1 << 64) - 1),
    "stop": st.one_of(WORDS, st.lists(WORDS, max_size=3)),
    "stop_token_ids": st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3),
    "ignore_eos": st.booleans(),
    "priority": st.integers(-100, 100),
    "cache_salt": st.sampled_from(["", "a", "b"]),
    "skip_special_tokens": st.booleans(),
    "n": st.just(1),
    "response_format": st.just({"type": "text"}),
    "user": WORDS,
}
STREAMED = st.one_of(
    st.just({}),
    st.just({"stream": True}),
    STREAM_OPTIONS.map(lambda options: {"stream": True, "stream_options": options}),
)
COMPLETION = {
    "prompt": st.one_of(
        WORDS, TOKEN_IDS, st.lists(WORDS, min_size=1, max_size=3), st.lists(TOKEN_IDS, min_size=1, max_size=3)
    ),
    "asks": st.one_of(st.just({}), st.just({"echo": True}), st.integers(0, 20).map(lambda n: {"logprobs": n})),
}
CONVERSATION = {
    "messages": st.lists(MESSAGE, min_size=1, max_size=2),
    "asks": st.one_of(st.just({}), st.integers(0, 20).map(lambda n: {"logprobs": True, "top_logprobs": n})),
}
ITEM = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "developer", "user", "assistant"]), "content": WORDS}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]), "role": JSON},
        optional=dict.fromkeys(("content", "call_id", "name", "arguments", "output", "summary"), JSON),
    ),
)
RESPONSE = {
    "input": st.one_of(WORDS, st.lists(ITEM, min_size=1, max_size=3)),
    "asks": st.integers(4, 20).map(lambda n: {"max_output_tokens": n}),
}
OF_RESPONSES = {name: field for name, field in FIELDS.items() if name != "max_tokens"}
ODD_NAMES = sorted(
    {*FIELDS, *NOT_IN_COMPLETIONS, *NOT_IN_CHAT, "prompt", "messages", "stream", "logprobs", "echo", "prompt_logprobs"}
    | {*NOT_IN_RESPONSES, "input", "instructions", "reasoning", "text", "tools", "tool_choice", "metadata"}
)


def bodies(prompt: dict[str, Any], optional: dict[str, Any] = FIELDS) -> st.SearchStrategy[bytes]:
    """Draws bodies as they should be; or with fields that are anything at all; or no JSON."""
    asked = st.fixed_dictionaries({**prompt, "streamed": STREAMED}, optional=optional)
    good = asked.map(lambda body: {**body, **body.pop("asks"), **body.pop("streamed")})
    odd = st.dictionaries(st.one_of(st.sampled_from(ODD_NAMES), TEXT), JSON, min_size=1, max_size=2)
    strange = st.tuples(good, odd).map(lambda pair: {**pair[0], **pair[1]})
    return st.one_of(st.one_of(good, strange).map(lambda body: json.dumps(body).encode()), st.binary(max_size=60))


ENDPOINTS = {
    "/v1/completions": bodies(COMPLETION),
    "/v1/chat/completions": bodies(CONVERSATION),
    "/v1/responses": bodies(RESPONSE, OF_RESPONSES),
}
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        name: st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40).map(str.strip)
        for name in ("x-request-id", "traceparent", *TIMEOUTS, "content-type")
    },
)


def named_events(body: str) -> list[str]:
    """Returns the names of a response's events, and asserts that each event says its own."""
    names = []
    for number, frame in enumerate(body.removesuffix("\n\n").split("\n\n")):
        name, data = frame.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        assert told["sequence_number"] == number
        names.append(told["type"])
    return names


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def unharmed(cluster: Cluster) -> AsyncIterator[None]:
    yield
    async with bare_client(cluster) as client:
        good = await client.post("/v1/completions", json=GOOD)
    assert (good.status_code, good.json()["usage"]["completion_tokens"]) == (200, 8)


@pytest.mark.parametrize("path", ENDPOINTS)
@given(draw=st.data())
@settings(
    max_examples=num_examples(120),
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_bodies(cluster: Cluster, path: str, draw: Any) -> None:
    body, headers = draw.draw(ENDPOINTS[path]), draw.draw(HEADERS)
    async with bare_client(cluster) as client:
        answer = await client.post(path, content=body, headers={"content-type": "application/json", **headers})
        assert answer.headers["x-request-id"] == (headers.get("x-request-id") or answer.headers["x-request-id"])
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.status_code == 200
            if path == "/v1/responses":
                assert named_events(answer.text)[-1] in ("response.completed", "response.incomplete")
            else:
                assert events(answer.text)[-1] == "[DONE]"
        elif answer.status_code == 200 and path == "/v1/responses":
            assert answer.json()["status"] in ("completed", "incomplete")
        elif answer.status_code == 200:
            choices = answer.json()["choices"]
            assert [choice["index"] for choice in choices] == list(range(len(choices)))
            assert all(choice["finish_reason"] in ("stop", "length") for choice in choices)
        else:
            # A time that is too short for the request, as its header may say, is 429 or 504.
            assert answer.status_code in ERRORS | ({429, 504} if headers.keys() & set(TIMEOUTS) else set())
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    event(f"status {answer.status_code}")
    await cluster.idle()
