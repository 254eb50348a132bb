"""Tests HTTP with every number of headers and bodies at its extremes, at each endpoint: each is served or refused by
name.

An innocent request beside each of them gets the tokens it always gets, and nothing is held afterwards.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from services.router.text.token_texts import TokenTexts
from tests.support.cluster import Cluster
from tests.support.http_client import TIMEOUTS
from tests.support.text_model import byte_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

INNOCENT = [9] * 20
NUM_TOKENS = 8
AT_ONCE = 8
_EITHER = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": INNOCENT, **_EITHER},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], **_EITHER},
}
Header = tuple[bytes, bytes]


async def answer(cluster: Cluster, path: str, headers: Sequence[Header] = (), body: bytes = b"") -> tuple[int, bytes]:
    """Returns (status, body) of what the server answered before it closed; status 0 if it closed without a word.

    Of the usual headers those are left out that `headers` has. The body is a good one unless it is given.
    """
    body = body or json.dumps(GOOD[path]).encode()
    usual = {b"host": b"localhost", b"content-type": b"application/json", b"content-length": b"%d" % len(body)}
    usual[b"connection"] = b"close"
    lines = [*((name, text) for name, text in usual.items() if name not in dict(headers)), *headers]
    head = b"".join(b"%b: %b\r\n" % line for line in lines)
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
    writer.write(b"POST %b HTTP/1.1\r\n" % path.encode() + head + b"\r\n" + body)
    if writer.can_write_eof() and b"content-length" in dict(headers):
        writer.write_eof()  # no more than this is coming, whatever the header says
    async with asyncio.timeout(20.0):
        whole = await reader.read()
    writer.close()
    return (int(whole.split(b" ", 2)[1]), whole.partition(b"\r\n\r\n")[2]) if whole else (0, b"")


async def beside_innocents(
    cluster: Cluster, path: str, cases: Sequence[tuple[Sequence[Header], bytes]]
) -> list[tuple[int, bytes]]:
    """Returns what `answer` returns for each (headers, body). All are sent, a few at once, each few beside an innocent
    request that must get its tokens; afterwards nothing is held."""
    known = (await cluster.greedy(INNOCENT, NUM_TOKENS)).token_ids
    answers = []
    for begin in range(0, len(cases), AT_ONCE):
        few = cases[begin : begin + AT_ONCE]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(answer(cluster, path, headers, body)) for headers, body in few]
            innocent = group.create_task(cluster.greedy(INNOCENT, NUM_TOKENS))
        assert innocent.result().token_ids == known
        answers += [task.result() for task in asked]
    await cluster.idle()
    return answers


def refusal(body: bytes) -> str:
    """Returns the message of a typed error."""
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return str(error["message"])


WHOLE = [b"0", b"1", b"-1", b"+1", b"2147483648", b"9007199254740993", b"9300000000000000", b"9" * 400, b"9" * 5000]
WORDS_FOR_NUMBERS = [b"nan", b"inf", b"-inf", b"Infinity", b"", b" ", b"\t1", b"1 2", b"1,1", b"1_0", b"0x10", b"\x00"]
FRACTIONS = [b"1e300", b"-1e300", b"1e9999", b"9.3e15", b"5e-324", b"1e-9", b".5", b"1.", b"1.5e", b"0.0", b"-0"]
OTHER_DIGITS = ["１".encode(), "١".encode(), b"\xb2", b"\xff"]
TEXTS = [*WHOLE, *WORDS_FOR_NUMBERS, *FRACTIONS, *OTHER_DIGITS]
ENOUGH = {b"2147483648", b"9007199254740993", b"9300000000000000", b"1e300", b"1e9999", b"9.3e15"}
"""A day at the least: the request is answered as if there were no deadline."""
BRIEF = {b"1", b"1.", b"\t1", b"1e-9", b"5e-324"}
"""These are numbers, if perhaps too small to be met."""
STATUSES = {200, 400, 404, 408, 411, 413, 415, 422, 429, 431, 501, 504}


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("name", TIMEOUTS)
async def test_of_a_timeout(cluster: Cluster, name: str, path: str) -> None:
    answers = await beside_innocents(cluster, path, [([(name.encode(), text)], b"") for text in TEXTS])
    for text, (status, body) in zip(TEXTS, answers, strict=True):
        if text in ENOUGH:
            assert status == 200, (text, body)
            assert json.loads(body)["usage"]["completion_tokens"] == NUM_TOKENS
        elif text in BRIEF:
            assert status in {200, 429, 504}, (text, body)
        else:
            assert status == 400, (text, body)
            if text != b"\x00":  # that byte ends the reading of any header
                assert name in refusal(body)


SEVERAL = [
    *[[(name, b"60"), (name, second)] for name in TIMEOUTS for second in (b"60", b"", b"nan", b"-1", b"1e300")],
    *[[(name, b"nan"), (name, b"60")] for name in TIMEOUTS],
    [(TIMEOUTS[0].upper(), b"60"), (TIMEOUTS[0], b"60")],
    [(TIMEOUTS[1], b"60")] * 50,
    [(TIMEOUTS[0], b"60"), (TIMEOUTS[1], b"-1")],
    [(TIMEOUTS[0], b"nan"), (TIMEOUTS[1], b"60000")],
]


@pytest.mark.parametrize("path", GOOD)
async def test_of_timeouts_that_contradict_each_other(cluster: Cluster, path: str) -> None:
    """They are the same header twice, or one that is no number beside the other that is one."""
    cases = [([(name.encode(), text) for name, text in several], b"") for several in SEVERAL]
    for several, (status, body) in zip(SEVERAL, await beside_innocents(cluster, path, cases), strict=True):
        assert status == 400, (several, body)
        assert any(name.lower() in refusal(body) for name, _ in several)


OF_TWO = [(b"1e300", b"1e300", {200}), (b"1e300", b"5e-324", {429, 504}), (b"5e-324", b"9.3e15", {429, 504})]


@pytest.mark.parametrize("path", GOOD)
async def test_of_two_timeouts_the_shorter_counts(cluster: Cluster, path: str) -> None:
    names = [name.encode() for name in TIMEOUTS]
    cases = [(list(zip(names, texts, strict=True)), b"") for *texts, _ in OF_TWO]
    for case, (status, body) in zip(OF_TWO, await beside_innocents(cluster, path, cases), strict=True):
        assert status in case[2], (case, body)


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("name", ["content-length", "x-request-id", "traceparent", "transfer-encoding", "expect"])
async def test_of_other_headers(cluster: Cluster, name: str, path: str) -> None:
    answers = await beside_innocents(cluster, path, [([(name.encode(), text)], b"") for text in TEXTS])
    for text, (status, body) in zip(TEXTS, answers, strict=True):
        assert status in STATUSES | {0}, (text, body)


NUMBERS_IN_JSON = [
    *["0", "1", "-1", "-0", "-0.0", "2147483648", "-2147483649", "9007199254740993", "9300000000000000"],
    *["18446744073709551616", "-9223372036854775809", "NaN", "Infinity", "-Infinity", "1e300", "-1e300", "1e9999"],
    *["5e-324", "1e-45", "3.5e38", "9.3e15", "9" * 400, "9" * 5000, "1" + "0" * 400, "-1" + "0" * 400],
    *["", "１", "0x10", "1_0", "+1", "01", '""', '"1"', '"１"', "true", "null", "[]", "{}", "[1]"],
]
_OF_BOTH = [
    *["max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"],
    *["frequency_penalty", "seed", "priority", "n", "best_of", "stop_token_ids", "logit_bias", "key of logit_bias"],
    *["stream_options", "stop", "prompt_logprobs", "truncate_prompt_tokens", "allowed_token_ids"],
]
NUMERIC_FIELDS = [
    *(("/v1/completions", name) for name in [*_OF_BOTH, "logprobs", "prompt"]),
    *(("/v1/chat/completions", name) for name in [*_OF_BOTH, "max_completion_tokens", "top_logprobs", "messages"]),
]
WRITTEN = {
    "prompt": '"prompt": [%s]',
    "stop": '"stop": [%s]',
    "stop_token_ids": '"stop_token_ids": [%s]',
    "logit_bias": '"logit_bias": {"5": %s}',
    "key of logit_bias": '"logit_bias": {"%s": 1}',
    "stream_options": '"stream": true, "stream_options": {"include_usage": %s}',
    "allowed_token_ids": '"allowed_token_ids": [%s]',
    "top_logprobs": '"logprobs": true, "top_logprobs": %s',
    "messages": '"messages": [{"role": "user", "content": %s}]',
}
"""Fields whose numbers stand inside something else."""


@pytest.mark.parametrize(("path", "field"), NUMERIC_FIELDS)
async def test_in_a_body(cluster: Cluster, path: str, field: str) -> None:
    rest = json.dumps({name: value for name, value in GOOD[path].items() if name != field})[1:]
    written = WRITTEN.get(field, f'"{field}": %s')
    bodies = [f"{{{written % number}, {rest}".encode() for number in NUMBERS_IN_JSON]
    answers = await beside_innocents(cluster, path, [((), body) for body in bodies])
    for sent, (status, body) in zip(bodies, answers, strict=True):
        assert status in {200, 400}, (sent[:200], body)
        if status == 400:
            refusal(body)


async def test_each_field_that_takes_a_number_is_tried() -> None:
    """A field that is added needs no more than its name above."""
    from services.router.front.http import chat, completions
    from services.router.front.http.body import Body

    taken: set[str] = set()

    class Noting(Body):
        def whole(self, name: str, bounds: tuple[int, int] = (0, 0)) -> int | None:
            taken.add(name)
            return None

        def number(self, name: str) -> float | None:
            taken.add(name)
            return None

    texts = TokenTexts(byte_tokenizer())
    for read_call, path in ((completions.read_call, "/v1/completions"), (chat.read_call, "/v1/chat/completions")):
        taken.clear()
        read_call(Noting(GOOD[path]), texts)
        assert taken
        assert {(path, name) for name in taken} <= set(NUMERIC_FIELDS)
