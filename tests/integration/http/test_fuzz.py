"""HTTP under random bodies and headers: an answer, or an error that names its kind; never a 5xx, and nothing is held.

`BATON_EXAMPLES=2000 pytest tests/integration/http/test_fuzz.py` draws more, from the same sequence.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import hypothesis.strategies as st
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, event, given, settings

from services.router.http.parameters import NOT_IN_CHAT, NOT_IN_COMPLETIONS
from tests.support.cluster import Cluster, running_cluster
from tests.support.examples import num_examples
from tests.support.http_client import HTTP, bare_client, events
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.workers import DECODE, PREFILL

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT_TOKENS = 80
ERRORS = {400, 404, 415}
TIMEOUTS = ["x-request-timeout", "x-envoy-expected-rq-timeout-ms"]
GOOD: dict[str, Any] = {"prompt": [9] * 20, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], **GOOD}
del CHAT["prompt"]
ASKED = {"/v1/completions": GOOD, "/v1/chat/completions": CHAT}

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
ODD_NAMES = sorted({*FIELDS, *NOT_IN_COMPLETIONS, *NOT_IN_CHAT, "prompt", "messages", "stream", "logprobs"})


def bodies(prompt: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """As they should be; or with fields that are anything at all; or no JSON."""
    asked = st.fixed_dictionaries({**prompt, "streamed": STREAMED}, optional=FIELDS)
    good = asked.map(lambda body: {**body, **body.pop("asks"), **body.pop("streamed")})
    odd = st.dictionaries(st.one_of(st.sampled_from(ODD_NAMES), TEXT), JSON, min_size=1, max_size=2)
    strange = st.tuples(good, odd).map(lambda pair: {**pair[0], **pair[1]})
    return st.one_of(st.one_of(good, strange).map(lambda body: json.dumps(body).encode()), st.binary(max_size=60))


ENDPOINTS = {"/v1/completions": bodies(COMPLETION), "/v1/chat/completions": bodies(CONVERSATION)}
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        name: st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40).map(str.strip)
        for name in ("x-request-id", "traceparent", *TIMEOUTS, "content-type")
    },
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    model = tiny_model("llama", tmp_path_factory.mktemp("http-fuzz"))
    async with running_cluster(
        model, [PREFILL, DECODE], router=HTTP, kv_blocks=40, max_model_len=CONTEXT_TOKENS
    ) as cluster:
        yield cluster


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
            assert events(answer.text)[-1] == "[DONE]"
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


# -- every number at its extremes

WHOLE = [b"0", b"1", b"-1", b"+1", b"2147483648", b"9007199254740993", b"9300000000000000", b"9" * 400, b"9" * 5000]
WORDS_FOR_NUMBERS = [b"nan", b"inf", b"-inf", b"Infinity", b"", b" ", b"\t1", b"1 2", b"1,1", b"1_0", b"0x10", b"\x00"]
FRACTIONS = [b"1e300", b"-1e300", b"1e9999", b"9.3e15", b"5e-324", b"1e-9", b".5", b"1.", b"1.5e", b"0.0", b"-0"]
OTHER_DIGITS = ["１".encode(), "١".encode(), b"\xb2", b"\xff"]
TEXTS = [*WHOLE, *WORDS_FOR_NUMBERS, *FRACTIONS, *OTHER_DIGITS]
ENOUGH = {b"2147483648", b"9007199254740993", b"9300000000000000", b"1e300", b"1e9999", b"9.3e15"}
"""A day at the least: the request is answered as if there were no deadline."""
STATUSES = {200, 400, 404, 408, 411, 413, 415, 422, 429, 431, 501, 504}


async def raw_status(cluster: Cluster, headers: dict[bytes, bytes], path: str = "/v1/completions") -> tuple[int, bytes]:
    """(status, body) of what the server answered before it closed; status 0 if it closed without a word."""
    body = json.dumps(ASKED[path]).encode()
    lines = {b"host": b"localhost", b"content-type": b"application/json", b"content-length": b"%d" % len(body)}
    lines |= {b"connection": b"close", **headers}
    head = b"".join(b"%b: %b\r\n" % line for line in lines.items())
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
    writer.write(b"POST %b HTTP/1.1\r\n" % path.encode() + head + b"\r\n" + body)
    if writer.can_write_eof() and lines[b"content-length"] != b"%d" % len(body):
        writer.write_eof()  # no more than this is coming, whatever the header says
    async with asyncio.timeout(20.0):
        answer = await reader.read()
    writer.close()
    return (int(answer.split(b" ", 2)[1]), answer.partition(b"\r\n\r\n")[2]) if answer else (0, b"")


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:20]))
@pytest.mark.parametrize("name", TIMEOUTS)
@pytest.mark.parametrize("path", ASKED)
async def test_extremes_of_a_timeout(cluster: Cluster, path: str, name: str, text: bytes) -> None:
    known = (await cluster.greedy(GOOD["prompt"], 8)).token_ids
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(raw_status(cluster, {name.encode(): text}, path))
        innocent = group.create_task(cluster.greedy(GOOD["prompt"], 8))
    status, body = asked.result()
    if text in ENOUGH:
        assert status == 200, body
        assert json.loads(body)["usage"]["completion_tokens"] == 8
    elif text not in (b"1", b"1.", b"\t1", b"1e-9", b"5e-324"):  # these are numbers, if perhaps too small to be met
        assert status == 400
        if text != b"\x00" and body.startswith(b"{"):  # that byte ends the reading of any header
            assert name in json.loads(body)["error"]["message"]
    assert innocent.result().token_ids == known
    await cluster.idle()


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:20]))
@pytest.mark.parametrize("name", ["content-length", "x-request-id", "traceparent", "transfer-encoding", "expect"])
async def test_extremes_of_other_headers(cluster: Cluster, name: str, text: bytes) -> None:
    known = (await cluster.greedy(GOOD["prompt"], 8)).token_ids
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(raw_status(cluster, {name.encode(): text}))
        innocent = group.create_task(cluster.greedy(GOOD["prompt"], 8))
    status, body = asked.result()
    assert status in STATUSES | {0}, body
    assert innocent.result().token_ids == known
    await cluster.idle()


NUMBERS_IN_JSON = [
    *["0", "1", "-1", "2147483648", "-2147483649", "9007199254740993", "9300000000000000", "18446744073709551616"],
    *["NaN", "Infinity", "-Infinity", "1e300", "-1e300", "1e9999", "5e-324", "1e-45", "9.3e15", "9" * 400, "9" * 5000],
]
NUMERIC_FIELDS = [
    *["max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"],
    *["frequency_penalty", "seed", "priority", "logprobs", "n", "best_of", "prompt", "stop_token_ids", "logit_bias"],
    *["max_completion_tokens", "top_logprobs", "messages"],
]
OF_A_LIST = {"prompt": "[%s]", "stop_token_ids": "[%s]", "logit_bias": '{"5": %s}', "messages": "[%s]"}


@pytest.mark.parametrize("field", NUMERIC_FIELDS)
@pytest.mark.parametrize("path", ASKED)
async def test_extremes_in_a_body(cluster: Cluster, path: str, field: str) -> None:
    known = (await cluster.greedy(GOOD["prompt"], 8)).token_ids
    rest = json.dumps({name: value for name, value in ASKED[path].items() if name != field})[1:]
    async with bare_client(cluster) as client:
        for number in NUMBERS_IN_JSON:
            body = f'{{"{field}": {OF_A_LIST.get(field, "%s") % number}, {rest}'
            async with asyncio.TaskGroup() as group:
                headers = {"content-type": "application/json"}
                asked = group.create_task(client.post(path, content=body, headers=headers))
                innocent = group.create_task(cluster.greedy(GOOD["prompt"], 8))
            assert asked.result().status_code in {200, 400}, (number, asked.result().text)
            assert innocent.result().token_ids == known
    await cluster.idle()
