"""Tests every range that the proto states, from both sides."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import text_format

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import InvalidRequest
from services.router.front.validation import (
    MAX_PROMPT_TOKENS,
    MOST_LOGPROB_BYTES,
    check_fits_one_message,
    check_token_ids,
    validate,
)
from services.router.text.model_facts import ModelFacts

FACTS = ModelFacts("tiny", vocab_size=100, max_text_bytes=50)
NAN, INF = float("nan"), float("inf")


def request(text: str = "", **changes: Any) -> inference_pb2.GenerateRequest:
    """Makes a request from proto text format; a prompt is added if there is none."""
    message = inference_pb2.GenerateRequest()
    text_format.Parse(text, message)
    if message.WhichOneof("prompt") is None:
        message.text = "hello"
    return message


REFUSED = [
    ('text: ""', "text"),
    ('text: "%s"' % ("x" * 51), "text"),
    ("token_ids {}", "token_ids"),
    ("messages {}", "messages"),
    ("messages { messages { role: 'user' content: '%s' } }" % ("x" * 51), "messages"),
    ("messages { messages { role: 'user' } messages { role: 'tool' } }", "messages[1].role"),
    ("messages { %s }" % ("messages { role: 'user' }" * 1025), "messages"),
    ("messages { messages { role: 'user' } template_variables { name: 'a' } }", "messages.template_variables.a"),
    (
        "messages { messages { role: 'user' } template_variables { name: 'tools' boolean: true } }",
        "messages.template_variables.tools",
    ),
    ("messages { messages { role: 'user' } template_variables { name: 'a' text: '%s' } }" % ("x" * 51), "messages"),
    ("request_id: ''", "request_id"),
    ("request_id: '%s'" % ("x" * 129), "request_id"),
    (r"request_id: 'a\nb'", "request_id"),
    ("session: '%s'" % ("x" * 129), "session"),
    ("cache_salt: '%s'" % ("x" * 129), "cache_salt"),
    ("priority: 101", "priority"),
    ("priority: -101", "priority"),
    ("response { logprobs: 21 }", "response.logprobs"),
    ("response { logprobs: -1 }", "response.logprobs"),
    ("stopping { max_tokens: 0 }", "stopping.max_tokens"),
    ("stopping { max_tokens: -5 }", "stopping.max_tokens"),
    ("stopping { min_tokens: -1 }", "stopping.min_tokens"),
    ("stopping { min_tokens: 5 max_tokens: 4 }", "stopping.min_tokens"),
    ("stopping { stop: '' }", "stopping.stop[0]"),
    ("stopping { stop: 'a' stop: '%s' }" % ("x" * 257), "stopping.stop[1]"),
    ("stopping { %s }" % ("stop: 'a' " * 17), "stopping.stop"),
    ("stopping { stop_token_ids: 100 }", "stopping.stop_token_ids[0]"),
    ("stopping { %s }" % ("stop_token_ids: 1 " * 65), "stopping.stop_token_ids"),
    ("sampling { logit_bias { token_id: -1 } }", "sampling.logit_bias[0].token_id"),
    ("sampling { logit_bias { token_id: 1 bias: 101 } }", "sampling.logit_bias[0].bias"),
    ("sampling { %s }" % ("logit_bias { token_id: 1 }" * 1025), "sampling.logit_bias"),
    ("sampling { top_k: -1 }", "sampling.top_k"),
    ("sampling { allowed_token_ids: [1, 100] }", "sampling.allowed_token_ids[1]"),
    ("sampling { %s }" % ("allowed_token_ids: 1 " * 1025), "sampling.allowed_token_ids"),
    ("sampling { bad_words: 'a' bad_words: ' ' }", "sampling.bad_words[1]"),
    ("sampling { bad_words: '%s' }" % ("x" * 257), "sampling.bad_words[0]"),
    ("sampling { %s }" % ("bad_words: 'a' " * 129), "sampling.bad_words"),
    ("sampling { bad_token_ids {} }", "sampling.bad_token_ids[0].token_ids"),
    ("sampling { %s }" % ("bad_token_ids { token_ids: 1 } " * 257), "sampling.bad_token_ids"),
    (
        "sampling { allowed_token_ids: [4, 5] bad_token_ids { token_ids: [1, 4] } bad_token_ids { token_ids: 5 } }",
        "sampling.allowed_token_ids",
    ),
    ("cache_salt: ''", "cache_salt"),
]


@pytest.mark.parametrize(("text", "field"), REFUSED, ids=range(len(REFUSED)))
def test_refused(text: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate(request(text), FACTS)
    assert refused.value.field == field


def test_bytes_count_and_not_characters() -> None:
    validate(request("text: '%s'" % ("é" * 25)), FACTS)
    with pytest.raises(InvalidRequest, match="has 52 bytes of text; at most 50 are allowed"):
        validate(request("text: '%s'" % ("é" * 26)), FACTS)
    halves = "messages { role: 'user' content: '%s' } " % ("x" * 26) * 2
    with pytest.raises(InvalidRequest, match="has 52 bytes of text"):
        validate(request("messages { " + halves + "}"), FACTS)


def test_token_ids_are_counted_before_they_are_walked_through() -> None:
    message = inference_pb2.GenerateRequest()
    message.token_ids.ids.extend([-1] * MAX_PROMPT_TOKENS)
    validate(message, FACTS)
    message.token_ids.ids.append(0)
    with pytest.raises(InvalidRequest, match=f"has {MAX_PROMPT_TOKENS + 1} entries; at most {MAX_PROMPT_TOKENS}"):
        validate(message, FACTS)


@pytest.mark.parametrize("ids", [[100], [1, -1], [1 << 30]])
def test_token_ids_outside_the_vocabulary(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match=r"has ids outside \[0, 100\)"):
        check_token_ids(ids, FACTS)
    check_token_ids([0, 99], FACTS)


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("temperature", [-0.1, 100.5, NAN, INF, -INF], [0, 100]),
        ("top_p", [-1, 1.01, NAN, INF], [0, 0.01, 1]),
        ("min_p", [-0.1, 1.1, NAN], [0, 1]),
        ("repetition_penalty", [0, -1, 101, NAN, INF], [0.1, 100]),
        ("presence_penalty", [-2.1, 2.1, NAN], [-2, 2]),
        ("frequency_penalty", [-2.1, 2.1, NAN], [-2, 2]),
    ],
)
def test_numbers(name: str, bad: list[float], good: list[float]) -> None:
    for value in bad:
        message = request()
        setattr(message.sampling, name, value)
        with pytest.raises(InvalidRequest) as refused:
            validate(message, FACTS)
        assert refused.value.field == f"sampling.{name}"
    for value in good:
        message = request()
        setattr(message.sampling, name, value)
        validate(message, FACTS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "text: '%s'" % ("x" * 50),
        "model: 'tiny' request_id: 'a' priority: 100 session: 's' cache_salt: 'c'",
        "token_ids { ids: [0, 99] }",
        "messages { messages { role: 'system' content: 'x' } messages { role: 'assistant' } }",
        "stopping { max_tokens: 1 min_tokens: 1 stop: '\\n' stop_token_ids: 99 } response { logprobs: 0 }",
        "sampling { logit_bias { token_id: 99 bias: -100 } seed: 0 top_k: 0 }",
    ],
)
def test_accepted(text: str) -> None:
    validate(request(text), FACTS)


def test_a_prompt_is_needed() -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate(inference_pb2.GenerateRequest(), FACTS)
    assert refused.value.field == "prompt"


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 20])
@pytest.mark.parametrize("said", [True, False], ids=["max_tokens", "the context"])
def test_what_a_whole_answer_may_hold_fits_one_message(num_logprobs: int, said: bool) -> None:
    """The longest answer that is taken, with the largest numbers there are, fits; and not one token more is refused in
    vain by more than a quarter."""

    def asks(num_tokens: int) -> None:
        stopping = f"stopping {{ max_tokens: {num_tokens} }}" if said else ""
        message = request(f"response {{ logprobs: {num_logprobs} }} {stopping}")
        check_fits_one_message(message, 1 << 20 if said else num_tokens + 1)

    with pytest.raises(InvalidRequest, match="GenerateStream") as refused:
        asks(MOST_LOGPROB_BYTES)
    assert refused.value.field == "response.logprobs"
    most_tokens = int(str(refused.value).rpartition(" ")[2])
    asks(most_tokens)
    with pytest.raises(InvalidRequest):
        asks(most_tokens + 1)
    top = [types_pb2.TopLogprob(token_id=(1 << 31) - 1, logprob=-1.5)] * num_logprobs
    output = inference_pb2.Chunk(logprobs=[types_pb2.TokenLogprobs(logprob=-1.5, top=top)] * 1000)
    assert 0.75 * MOST_LOGPROB_BYTES < output.ByteSize() * most_tokens / 1000 <= MOST_LOGPROB_BYTES


def test_an_answer_without_logprobs_may_be_of_any_length() -> None:
    check_fits_one_message(request(), 1 << 30)
