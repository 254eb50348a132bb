"""Checks sampling and stopping parameters of wire messages against the ranges that the protos state.

Routers check what clients send, and workers what routers send: one bad number in a step would fail all its sequences.
Every error is an InvalidRequest that names the field. Pure. Never: checks what depends on the prompt's length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from baton.v1 import types_pb2
from services.core.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_ANSWERS = 16


def check_sampling(sampling: types_pb2.SamplingParams, vocab_size: int) -> None:
    within("sampling.temperature", sampling.temperature, 0, 100)
    if sampling.HasField("top_p"):
        above("sampling.top_p", sampling.top_p, 0, 1)
    if sampling.top_k < 0:
        raise InvalidRequest("sampling.top_k", f"is {sampling.top_k}; it must not be negative")
    within("sampling.min_p", sampling.min_p, 0, 1)
    if sampling.HasField("repetition_penalty"):
        above("sampling.repetition_penalty", sampling.repetition_penalty, 0, 100)
    within("sampling.presence_penalty", sampling.presence_penalty, -2, 2)
    within("sampling.frequency_penalty", sampling.frequency_penalty, -2, 2)
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            "sampling.logit_bias", f"has {len(sampling.logit_bias)} entries; at most {MAX_LOGIT_BIASES} are allowed"
        )
    for index, entry in enumerate(sampling.logit_bias):
        _token_id(f"sampling.logit_bias[{index}].token_id", entry.token_id, vocab_size)
        within(f"sampling.logit_bias[{index}].bias", entry.bias, -100, 100)


def check_stopping(stopping: types_pb2.StoppingParams, vocab_size: int) -> None:
    if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
        raise InvalidRequest("stopping.max_tokens", f"is {stopping.max_tokens}; at least 1 is needed")
    if stopping.min_tokens < 0:
        raise InvalidRequest("stopping.min_tokens", f"is {stopping.min_tokens}; it must not be negative")
    if len(stopping.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stopping.stop", f"has {len(stopping.stop)} entries; at most {MAX_STOP_STRINGS} fit")
    for index, text in enumerate(stopping.stop):
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"stopping.stop[{index}]", f"must have 1 to {MAX_STOP_CHARS} characters")
    if len(stopping.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            "stopping.stop_token_ids",
            f"has {len(stopping.stop_token_ids)} entries; at most {MAX_STOP_TOKEN_IDS} are allowed",
        )
    for index, token_id in enumerate(stopping.stop_token_ids):
        _token_id(f"stopping.stop_token_ids[{index}]", token_id, vocab_size)


def within(field: str, value: float, low: float, high: float) -> None:
    """Raises InvalidRequest unless `low <= value <= high`. NaN is refused too."""
    if not low <= value <= high:
        raise InvalidRequest(field, f"is {_number(value)}; it must be in [{low}, {high}]")


def above(field: str, value: float, low: float, high: float) -> None:
    if not low < value <= high:
        raise InvalidRequest(field, f"is {_number(value)}; it must be in ({low}, {high}]")


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
