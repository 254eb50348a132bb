"""Checks a GenerateRequest against the ranges its proto states. Pure: never tokenises, queues or places.

Every error is an InvalidRequest that names the field.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.v1 import inference_pb2
from services.core.errors import InvalidRequest
from services.rpc.parameters import MAX_LOGPROBS, check_sampling, check_stopping, within

MAX_LABEL_CHARS = 128
MAX_MESSAGES = 1024
MAX_PROMPT_TOKENS = 1 << 20
"""The most token ids in a prompt, even in one that is to be truncated."""
MAX_PRIORITY = 100
MOST_LOGPROB_BYTES = 3 << 20
"""The most bytes of log-probabilities in an answer of one message: gRPC's clients take no more than 4 MiB unless told
to, and the text is in it too."""
_TOKEN_BYTES, _TOP_BYTES = 8, 13
"""A position's log-probability, and each of the likeliest tokens', encoded: with the longest ids and no more."""
CHAT_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class ModelFacts:
    """Holds the facts of a served model that its requests are checked against."""

    model_id: str
    vocab_size: int
    max_text_bytes: int
    """The most bytes, in UTF-8, of a prompt's text or of all messages together, even of one that is to be truncated."""


def validate(request: inference_pb2.GenerateRequest, facts: ModelFacts) -> None:
    """Raises InvalidRequest.

    Lengths in tokens, and token ids, are checked later, when the prompt is known to be no longer than its context.
    """
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


def check_fits_one_message(request: inference_pb2.GenerateRequest, context_tokens: int) -> None:
    """Raises InvalidRequest if a whole answer's log-probabilities could be more than a client takes in one message:
    it would learn of that when all is computed."""
    if not request.response.HasField("logprobs"):
        return
    most_tokens = context_tokens - 1
    if request.stopping.HasField("max_tokens"):
        most_tokens = min(most_tokens, request.stopping.max_tokens)
    num_logprobs = request.response.logprobs
    room = MOST_LOGPROB_BYTES // (_TOKEN_BYTES + num_logprobs * _TOP_BYTES)
    if most_tokens > room:
        raise InvalidRequest(
            "response.logprobs",
            f"is {num_logprobs}, and the answer may have {most_tokens} tokens: more than gRPC's clients take in one "
            f"message. Use GenerateStream, or stopping.max_tokens of at most {room}",
        )


def _prompt(request: inference_pb2.GenerateRequest, facts: ModelFacts) -> None:
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                raise InvalidRequest("text", "is empty")
            _text_bytes("text", [request.text], facts)
        case "token_ids":
            num_ids = len(request.token_ids.ids)
            if not num_ids:
                raise InvalidRequest("token_ids", "is empty")
            if num_ids > MAX_PROMPT_TOKENS:
                raise InvalidRequest("token_ids", f"has {num_ids} entries; at most {MAX_PROMPT_TOKENS} are allowed")
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
    _text_bytes("messages", [message.content for message in chat.messages], facts)


def check_token_ids(token_ids: Sequence[int], facts: ModelFacts) -> None:
    """Raises InvalidRequest if an id is out of range.

    It walks through all ids: call it only if they are known to be few.
    """
    if min(token_ids) < 0 or max(token_ids) >= facts.vocab_size:
        raise InvalidRequest("token_ids", f"has ids outside [0, {facts.vocab_size})")


def utf8_bytes(texts: Iterable[str]) -> int:
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)


def _text_bytes(field: str, texts: Sequence[str], facts: ModelFacts) -> None:
    num_bytes = utf8_bytes(texts)
    if num_bytes > facts.max_text_bytes:
        raise InvalidRequest(field, f"has {num_bytes} bytes of text; at most {facts.max_text_bytes} are allowed")


def _label(field: str, text: str) -> None:
    if len(text) > MAX_LABEL_CHARS:
        raise InvalidRequest(field, f"has {len(text)} characters; at most {MAX_LABEL_CHARS} are allowed")
    if not text.isprintable():
        raise InvalidRequest(field, "has characters that cannot be printed")
