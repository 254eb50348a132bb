"""Checks a GenerateRequest against the ranges its proto states. Pure: never tokenises, queues or places.

Every error is an InvalidRequest that names the field.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.v1 import inference_pb2
from services.core.errors import InvalidRequest
from services.router.front.tools import chat_texts, check_chat, check_tools
from services.router.text.model_facts import ModelFacts
from services.rpc.constraints import check_constraint
from services.rpc.parameters import MAX_ANSWERS, MAX_LOGPROBS, check_label, check_sampling, check_stopping, within

MAX_MESSAGES = 1024
MAX_PROMPT_TOKENS = 1 << 20
"""The most token ids in a prompt, even in one that is to be truncated."""
MAX_PRIORITY = 100
MOST_LOGPROB_BYTES = 3 << 20
"""The most bytes of log-probabilities in an answer of one message: gRPC's clients take no more than 4 MiB unless told
to, and the text is in it too."""
_TOKEN_BYTES, _TOP_BYTES = 8, 13
"""A position's log-probability, and each of the likeliest tokens', encoded: with the longest ids and no more."""
_RANK_BYTES = 4
MOST_PROMPT_ENTRIES = 1 << 16
"""The most log-probabilities of one prompt: that of each token, and those of the likeliest at its place."""


def validate(request: inference_pb2.GenerateRequest, facts: ModelFacts) -> None:
    """Raises InvalidRequest.

    Lengths in tokens, and token ids, are checked later, when the prompt is known to be no longer than its context.
    """
    if request.HasField("request_id"):
        check_label("request_id", request.request_id)
        if not request.request_id:
            raise InvalidRequest("request_id", "is empty")
    check_label("session", request.session)
    check_label("cache_salt", request.cache_salt)
    if request.HasField("cache_salt") and not request.cache_salt:
        raise InvalidRequest("cache_salt", "is empty")
    within("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if request.HasField("n"):
        within("n", request.n, 1, MAX_ANSWERS)
    if request.HasField("truncate_prompt_tokens"):
        within("truncate_prompt_tokens", request.truncate_prompt_tokens, 1, MAX_PROMPT_TOKENS)
    _prompt(request, facts)
    check_tools(request, facts.forms)
    check_sampling(request.sampling, facts.vocab_size)
    check_stopping(request.stopping, facts.vocab_size, least_tokens=0 if request.response.echo_text else 1)
    if request.stopping.HasField("max_tokens") and request.stopping.min_tokens > request.stopping.max_tokens:
        raise InvalidRequest("stopping.min_tokens", f"is {request.stopping.min_tokens}, more than max_tokens")
    if request.response.HasField("logprobs"):
        within("response.logprobs", request.response.logprobs, 0, MAX_LOGPROBS)
    if request.response.HasField("prompt_logprobs"):
        within("response.prompt_logprobs", request.response.prompt_logprobs, 0, MAX_LOGPROBS)
    if request.HasField("constraint"):
        check_constraint(request.constraint)


def check_prompt_logprobs(request: inference_pb2.GenerateRequest, num_prompt_tokens: int) -> None:
    """Raises InvalidRequest if more of the prompt's log-probabilities are wanted than an answer may have."""
    num_entries = num_prompt_entries(request, num_prompt_tokens)
    if num_entries > MOST_PROMPT_ENTRIES:
        room = MOST_PROMPT_ENTRIES // (1 + request.response.prompt_logprobs)
        raise InvalidRequest(
            "response.prompt_logprobs",
            f"is {request.response.prompt_logprobs}: with it a prompt may have {room} tokens, and has "
            f"{num_prompt_tokens}",
        )


def num_prompt_entries(request: inference_pb2.GenerateRequest, num_prompt_tokens: int) -> int:
    """Returns how many log-probabilities of the prompt the answer has."""
    if not request.response.HasField("prompt_logprobs"):
        return 0
    return num_prompt_tokens * (1 + request.response.prompt_logprobs)


def check_fits_one_message(
    request: inference_pb2.GenerateRequest, context_tokens: int, num_prompt_tokens: int = 0
) -> None:
    """Raises InvalidRequest if a whole answer's log-probabilities, or several answers, could be more than a client
    takes in one message: it would learn of that when all is computed. Log-probabilities of the prompt count too, once
    `num_prompt_tokens` is known."""
    num_answers = request.n or 1
    if not request.response.HasField("logprobs") and num_answers == 1:
        return
    taken = 0
    if request.response.HasField("prompt_logprobs"):
        per_token = _TOKEN_BYTES + _RANK_BYTES + request.response.prompt_logprobs * _TOP_BYTES
        taken = num_prompt_tokens * per_token
    most_tokens = context_tokens - 1
    if request.stopping.HasField("max_tokens"):
        most_tokens = min(most_tokens, request.stopping.max_tokens)
    num_logprobs = request.response.logprobs
    room = (MOST_LOGPROB_BYTES - taken) // (_TOKEN_BYTES + num_logprobs * _TOP_BYTES) // num_answers
    if most_tokens > room:
        field, asked = ("response.logprobs", num_logprobs) if num_answers == 1 else ("n", num_answers)
        raise InvalidRequest(
            field,
            f"is {asked}, and an answer may have {most_tokens} tokens: more than gRPC's clients take in one "
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
            _messages(request, facts)
        case _:
            raise InvalidRequest("prompt", "is missing: set text, token_ids or messages")


def _messages(request: inference_pb2.GenerateRequest, facts: ModelFacts) -> None:
    chat = request.messages
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        raise InvalidRequest("messages", f"has {len(chat.messages)} entries; 1 to {MAX_MESSAGES} are allowed")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequest("messages.continue_final_message", "cannot be given together with add_generation_prompt")
    if request.response.echo_text:
        raise InvalidRequest("response.echo_text", "is not available with messages")
    check_chat(chat.messages, facts.forms)
    _text_bytes("messages", chat_texts(request), facts)


def check_token_ids(token_ids: Sequence[int], facts: ModelFacts, field: str = "token_ids") -> None:
    """Raises InvalidRequest if an id is out of range.

    It walks through all ids: call it only if they are known to be few.
    """
    if min(token_ids) < 0 or max(token_ids) >= facts.vocab_size:
        raise InvalidRequest(field, f"has ids outside [0, {facts.vocab_size})")


def utf8_bytes(texts: Iterable[str]) -> int:
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)


def _text_bytes(field: str, texts: Sequence[str], facts: ModelFacts) -> None:
    num_bytes = utf8_bytes(texts)
    if num_bytes > facts.max_text_bytes:
        raise InvalidRequest(field, f"has {num_bytes} bytes of text; at most {facts.max_text_bytes} are allowed")
