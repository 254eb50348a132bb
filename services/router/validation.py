"""Checks a GenerateRequest against the ranges its proto states. Pure: never tokenises, queues or places.

Every error is an InvalidRequest naming the field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import InvalidRequest, UnknownModel

MAX_LABEL_CHARS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_MESSAGES = 1024
MAX_LOGPROBS = 20
MAX_PRIORITY = 100
CHAT_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class ModelFacts:
    """What requests are checked against."""

    model_id: str
    vocab_size: int
    max_prompt_chars: int
    """A longer text cannot fit any context, whatever its tokens."""


def validate(request: inference_pb2.GenerateRequest, facts: ModelFacts) -> None:
    """Raises InvalidRequest, or UnknownModel. Lengths in tokens are checked after tokenisation."""
    if request.HasField("model") and request.model != facts.model_id:
        raise UnknownModel(f"model {request.model!r} is not served; {facts.model_id!r} is")
    if request.HasField("request_id"):
        _label("request_id", request.request_id)
        if not request.request_id:
            raise InvalidRequest("request_id", "is empty")
    _label("session", request.session)
    _label("cache_salt", request.cache_salt)
    _within("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _prompt(request, facts)
    _sampling(request.sampling, facts)
    _stopping(request.stopping, facts)
    if request.response.HasField("logprobs"):
        _within("response.logprobs", request.response.logprobs, 0, MAX_LOGPROBS)


def _prompt(request: inference_pb2.GenerateRequest, facts: ModelFacts) -> None:
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                raise InvalidRequest("text", "is empty")
            _prompt_chars("text", len(request.text), facts)
        case "token_ids":
            ids = request.token_ids.ids
            if not ids:
                raise InvalidRequest("token_ids", "is empty")
            if min(ids) < 0 or max(ids) >= facts.vocab_size:
                raise InvalidRequest("token_ids", f"has ids outside [0, {facts.vocab_size})")
        case "messages":
            _messages(request.messages, facts)
        case _:
            raise InvalidRequest("prompt", "is missing: set text, token_ids or messages")


def _messages(chat: inference_pb2.ChatMessages, facts: ModelFacts) -> None:
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        raise InvalidRequest("messages", f"has {len(chat.messages)} entries; 1 to {MAX_MESSAGES} are allowed")
    for index, message in enumerate(chat.messages):
        if message.role not in CHAT_ROLES:
            raise InvalidRequest(f"messages[{index}].role", f"is {message.role!r}, not one of {', '.join(CHAT_ROLES)}")
    _prompt_chars("messages", sum(len(message.content) for message in chat.messages), facts)


def _prompt_chars(field: str, num_chars: int, facts: ModelFacts) -> None:
    if num_chars > facts.max_prompt_chars:
        raise InvalidRequest(field, f"has {num_chars} characters; at most {facts.max_prompt_chars} are allowed")


def _sampling(sampling: types_pb2.SamplingParams, facts: ModelFacts) -> None:
    _within("sampling.temperature", sampling.temperature, 0, 100)
    if sampling.HasField("top_p"):
        _above("sampling.top_p", sampling.top_p, 0, 1)
    if sampling.top_k < 0:
        raise InvalidRequest("sampling.top_k", f"is {sampling.top_k}; it must not be negative")
    _within("sampling.min_p", sampling.min_p, 0, 1)
    if sampling.HasField("repetition_penalty"):
        _above("sampling.repetition_penalty", sampling.repetition_penalty, 0, 100)
    _within("sampling.presence_penalty", sampling.presence_penalty, -2, 2)
    _within("sampling.frequency_penalty", sampling.frequency_penalty, -2, 2)
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            "sampling.logit_bias", f"has {len(sampling.logit_bias)} entries; at most {MAX_LOGIT_BIASES} are allowed"
        )
    for index, entry in enumerate(sampling.logit_bias):
        _token_id(f"sampling.logit_bias[{index}].token_id", entry.token_id, facts)
        _within(f"sampling.logit_bias[{index}].bias", entry.bias, -100, 100)


def _stopping(stopping: types_pb2.StoppingParams, facts: ModelFacts) -> None:
    if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
        raise InvalidRequest("stopping.max_tokens", f"is {stopping.max_tokens}; at least 1 is needed")
    if stopping.min_tokens < 0:
        raise InvalidRequest("stopping.min_tokens", f"is {stopping.min_tokens}; it must not be negative")
    if stopping.HasField("max_tokens") and stopping.min_tokens > stopping.max_tokens:
        raise InvalidRequest("stopping.min_tokens", f"is {stopping.min_tokens}, more than max_tokens")
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
        _token_id(f"stopping.stop_token_ids[{index}]", token_id, facts)


def _label(field: str, text: str) -> None:
    if len(text) > MAX_LABEL_CHARS:
        raise InvalidRequest(field, f"has {len(text)} characters; at most {MAX_LABEL_CHARS} are allowed")
    if not text.isprintable():
        raise InvalidRequest(field, "has characters that cannot be printed")


def _token_id(field: str, token_id: int, facts: ModelFacts) -> None:
    if not 0 <= token_id < facts.vocab_size:
        raise InvalidRequest(field, f"is {token_id}, outside [0, {facts.vocab_size})")


def _within(field: str, value: float, low: float, high: float) -> None:
    """Refuses NaN too: it is in no range."""
    if not low <= value <= high:
        raise InvalidRequest(field, f"is {_number(value)}; it must be in [{low}, {high}]")


def _above(field: str, value: float, low: float, high: float) -> None:
    if not low < value <= high:
        raise InvalidRequest(field, f"is {_number(value)}; it must be in ({low}, {high}]")


def _number(value: float) -> str:
    return f"{value:g}" if math.isfinite(value) else str(value)
