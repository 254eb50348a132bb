"""Checks sampling and stopping parameters of wire messages against the ranges that the protos state.

Routers check what clients send, and workers what routers send: one bad number in a step would fail all its sequences.
Every error is an InvalidRequest that names the field. Pure. Never: checks what depends on the prompt's length.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sized

from baton.v1 import types_pb2
from services.core.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS
MAX_BAD_SEQUENCE_TOKENS = 256
MAX_LABEL_CHARS = 128
MAX_LOGPROBS = 20
MAX_ANSWERS = 16


def check_label(field: str, text: str) -> None:
    """Checks a short text by which a client names something: it must not be too long, and be shown in one line."""
    if len(text) > MAX_LABEL_CHARS:
        raise InvalidRequest(field, f"has {len(text)} characters; at most {MAX_LABEL_CHARS} are allowed")
    if not text.isprintable():
        raise InvalidRequest(field, "has characters that cannot be printed")


def check_sampling(sampling: types_pb2.SamplingParams, vocab_size: int) -> None:
    within("sampling.temperature", sampling.temperature, 0, 100)
    within("sampling.top_p", sampling.top_p, 0, 1)
    if sampling.top_k < 0:
        raise InvalidRequest("sampling.top_k", f"is {sampling.top_k}; it must not be negative")
    within("sampling.min_p", sampling.min_p, 0, 1)
    if sampling.HasField("repetition_penalty"):
        above("sampling.repetition_penalty", sampling.repetition_penalty, 0, 100)
    within("sampling.presence_penalty", sampling.presence_penalty, -2, 2)
    within("sampling.frequency_penalty", sampling.frequency_penalty, -2, 2)
    _at_most("sampling.logit_bias", sampling.logit_bias, MAX_LOGIT_BIASES)
    for index, entry in enumerate(sampling.logit_bias):
        _token_id(f"sampling.logit_bias[{index}].token_id", entry.token_id, vocab_size)
        within(f"sampling.logit_bias[{index}].bias", entry.bias, -100, 100)
    _check_tokens(sampling, vocab_size)


def _check_tokens(sampling: types_pb2.SamplingParams, vocab_size: int) -> None:
    """Checks which tokens are allowed, and which are not."""
    _at_most("sampling.allowed_token_ids", sampling.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
    for index, token_id in enumerate(sampling.allowed_token_ids):
        _token_id(f"sampling.allowed_token_ids[{index}]", token_id, vocab_size)
    _at_most("sampling.bad_words", sampling.bad_words, MAX_BAD_WORDS)
    for index, word in enumerate(sampling.bad_words):
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise InvalidRequest(
                f"sampling.bad_words[{index}]", f"must have 1 to {MAX_BAD_WORD_CHARS} characters, and not only blanks"
            )
    _at_most("sampling.bad_token_ids", sampling.bad_token_ids, MAX_BAD_SEQUENCES)
    for index, sequence in enumerate(sampling.bad_token_ids):
        field = f"sampling.bad_token_ids[{index}].token_ids"
        if not 1 <= len(sequence.token_ids) <= MAX_BAD_SEQUENCE_TOKENS:
            raise InvalidRequest(field, f"must have 1 to {MAX_BAD_SEQUENCE_TOKENS} entries")
        for at, token_id in enumerate(sequence.token_ids):
            _token_id(f"{field}[{at}]", token_id, vocab_size)
    check_some_token_is_left(sampling)


def check_some_token_is_left(sampling: types_pb2.SamplingParams, masked: Container[int] = ()) -> None:
    """Raises InvalidRequest unless an allowed token surely remains wherever one is sampled: one that ends no sequence
    which is not to be, and is none of `masked`."""
    ends = {sequence.token_ids[-1] for sequence in sampling.bad_token_ids}
    allowed = sampling.allowed_token_ids
    if allowed and all(token_id in ends or token_id in masked for token_id in allowed):
        raise InvalidRequest(
            "sampling.allowed_token_ids", "leaves no token: bad words and min_tokens may forbid all that it has"
        )


def check_stopping(stopping: types_pb2.StoppingParams, vocab_size: int, *, least_tokens: int = 1) -> None:
    if stopping.HasField("max_tokens") and stopping.max_tokens < least_tokens:
        raise InvalidRequest("stopping.max_tokens", f"is {stopping.max_tokens}; at least {least_tokens} is needed")
    if stopping.min_tokens < 0:
        raise InvalidRequest("stopping.min_tokens", f"is {stopping.min_tokens}; it must not be negative")
    _at_most("stopping.stop", stopping.stop, MAX_STOP_STRINGS)
    for index, text in enumerate(stopping.stop):
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"stopping.stop[{index}]", f"must have 1 to {MAX_STOP_CHARS} characters")
    _at_most("stopping.stop_token_ids", stopping.stop_token_ids, MAX_STOP_TOKEN_IDS)
    for index, token_id in enumerate(stopping.stop_token_ids):
        _token_id(f"stopping.stop_token_ids[{index}]", token_id, vocab_size)


def within(field: str, value: float, low: float, high: float) -> None:
    """Raises InvalidRequest unless `low <= value <= high`. NaN is refused too."""
    if not low <= value <= high:
        raise InvalidRequest(field, f"is {_number(value)}; it must be in [{low}, {high}]")


def above(field: str, value: float, low: float, high: float) -> None:
    if not low < value <= high:
        raise InvalidRequest(field, f"is {_number(value)}; it must be in ({low}, {high}]")


def _at_most(field: str, entries: Sized, most: int) -> None:
    if len(entries) > most:
        raise InvalidRequest(field, f"has {len(entries)} entries; at most {most} are allowed")


def _token_id(field: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(field, f"is {token_id}, outside [0, {vocab_size})")


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def are_logprobs(entries: Iterable[types_pb2.TokenLogprobs]) -> bool:
    """Returns whether no log-probability is NaN or infinity, which JSON lacks. Minus infinity is a masked token's."""
    return all(
        entry.logprob < math.inf and all(top.token_id >= 0 and top.logprob < math.inf for top in entry.top)
        for entry in entries
    )
