"""Checks a GenerateRequest against the ranges its proto states. Pure: never tokenises, queues or places.

Every error is an InvalidRequest naming the field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.v1 import inference_pb2
from services.core.errors import ContextLengthExceeded, InvalidRequest, UnknownModel
from services.rpc.parameters import MAX_LOGPROBS, check_sampling, check_stopping, within

MAX_LABEL_CHARS = 128
MAX_MESSAGES = 1024
MAX_PRIORITY = 100
CHAT_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class ModelFacts:
    """What requests are checked against."""

    model_id: str
    vocab_size: int
    context_tokens: int
    longest_token_chars: int
    """So that a text may be too long for any context, whatever its tokens."""


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
    within("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _prompt(request, facts)
    check_sampling(request.sampling, facts.vocab_size)
    check_stopping(request.stopping, facts.vocab_size)
    if request.stopping.HasField("max_tokens") and request.stopping.min_tokens > request.stopping.max_tokens:
        raise InvalidRequest("stopping.min_tokens", f"is {request.stopping.min_tokens}, more than max_tokens")
    if request.response.HasField("logprobs"):
        within("response.logprobs", request.response.logprobs, 0, MAX_LOGPROBS)


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
    fewest_tokens = math.ceil(num_chars / facts.longest_token_chars)
    if fewest_tokens > facts.context_tokens:
        asked = f"the prompt's {num_chars} characters are at least {fewest_tokens}"
        raise ContextLengthExceeded.of(field, facts.context_tokens, asked)


def _label(field: str, text: str) -> None:
    if len(text) > MAX_LABEL_CHARS:
        raise InvalidRequest(field, f"has {len(text)} characters; at most {MAX_LABEL_CHARS} are allowed")
    if not text.isprintable():
        raise InvalidRequest(field, "has characters that cannot be printed")
