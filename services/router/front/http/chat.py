"""Serves /v1/chat/completions: the model answers messages, rendered by its chat template."""

from __future__ import annotations

from typing import Any

from baton.v1 import inference_pb2
from services.core.errors import InvalidRequest
from services.router.front.http.answers import Ending, HttpCall, Json, Objects, Prompt, chat_logprobs
from services.router.front.http.body import Body, as_list, as_record, as_text, bounded
from services.router.front.http.parameters import NOT_IN_CHAT, Neutral, read_shared, refuse_unsupported
from services.router.front.incoming import Incoming
from services.router.front.validation import MAX_MESSAGES
from services.router.text.token_texts import TokenTexts

MAX_PARTS = 256
"""The most content parts of one message."""
_OBJECTS = Objects("chatcmpl-", "chat.completion", "chat.completion.chunk")
# OpenAI's newer name for the role.
_ROLES = {"developer": "system"}
_TOOL_ROLES = ("tool", "function")
# Fields of messages whose content would be lost. Values that carry nothing are accepted.
_NOT_SUPPORTED: Neutral = {"tool_calls": ([],), "function_call": (), "audio": ()}


def read_call(body: Body, texts: TokenTexts) -> HttpCall:
    """Returns the call that the body describes. Raises InvalidRequest."""
    request = inference_pb2.GenerateRequest()
    refuse_unsupported(body, NOT_IN_CHAT)
    _messages(body, request)
    options = read_shared(body, request)
    params = {"response.logprobs": "top_logprobs", "prompt": "messages"}
    older, newer = body.whole("max_tokens"), body.whole("max_completion_tokens")
    max_tokens = older if newer is None else newer
    if newer is not None:
        params["stopping.max_tokens"] = "max_completion_tokens"
    if max_tokens is not None:
        request.stopping.max_tokens = max_tokens
    wanted, num_top = body.boolean("logprobs") or False, body.whole("top_logprobs")
    if num_top and not wanted:
        raise InvalidRequest("top_logprobs", "is only allowed together with logprobs")
    if wanted:
        request.response.logprobs = num_top or 0
    return HttpCall([Prompt(Incoming(request), ChatStyle(texts), params)], options, _OBJECTS)


def _messages(body: Body, request: inference_pb2.GenerateRequest) -> None:
    messages = body.take("messages")
    if messages is None:
        raise InvalidRequest("messages", "is missing")
    request.messages.SetInParent()
    for index, entry in enumerate(as_list(messages, "messages", MAX_MESSAGES)):
        path = f"messages[{index}]"
        message = Body(as_record(entry, path), path)
        role = message.text("role") or ""
        if role in _TOOL_ROLES:
            raise InvalidRequest(f"{path}.role", f"is {role!r}; tools are not supported by this server")
        refuse_unsupported(message, _NOT_SUPPORTED)
        content = _content(message.take("content"), f"{path}.content", role)
        request.messages.messages.add(role=_ROLES.get(role, role), content=content)


def _content(content: Any, path: str, role: str) -> str:
    """Returns the content as text: a string, or the parts of type text, each on a line of its own."""
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return as_text(content, path)
    if not isinstance(content, list):
        raise InvalidRequest(path, "must be a string or a list of parts")
    bounded(content, path, MAX_PARTS)
    texts = []
    for index, entry in enumerate(content):
        part = Body(as_record(entry, f"{path}[{index}]"), f"{path}[{index}]")
        kind = part.text("type")
        if kind != "text":
            raise InvalidRequest(f"{path}[{index}].type", f"is {kind!r}; only 'text' is supported by this server")
        text = part.text("text")
        if text is None:
            raise InvalidRequest(f"{path}[{index}].text", "is missing")
        texts.append(text)
    return "\n".join(texts)


class ChatStyle:
    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def whole(self, output: inference_pb2.Chunk, ending: Ending) -> Json:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": self._logprobs(output), **ending.fields()}

    def opening(self) -> Json | None:
        return _choice({"role": "assistant", "content": ""})

    def delta(self, chunk: inference_pb2.Chunk) -> Json | None:
        logprobs = self._logprobs(chunk)
        return _choice({"content": chunk.text}, logprobs) if chunk.text or logprobs else None

    def closing(self, ending: Ending) -> Json:
        return {**_choice({}), **ending.fields()}

    def _logprobs(self, chunk: inference_pb2.Chunk) -> Json | None:
        return chat_logprobs(self._texts, chunk.token_ids, chunk.logprobs) if chunk.logprobs else None


def _choice(delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}
