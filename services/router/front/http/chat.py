"""Serves /v1/chat/completions: the model answers messages, rendered by its chat template."""

from __future__ import annotations

from baton.v1 import inference_pb2
from services.core.errors import InvalidRequest
from services.router.front.call import Incoming
from services.router.front.http.answers import Ending, HttpCall, Json, Objects, Prompt, PromptScores, chat_logprobs
from services.router.front.http.body import Body, as_list, as_record
from services.router.front.http.content import REFUSAL, ROLES, as_content
from services.router.front.http.parameters import (
    NOT_IN_CHAT,
    OF_ENDINGS,
    Neutral,
    read_prompt_logprobs,
    read_shared,
    read_token_options,
    read_variables,
    refuse_unsupported,
)
from services.router.front.http.tools import call_deltas, calls, name_in_chats, read_calls, read_tools
from services.router.front.validation import MAX_MESSAGES
from services.router.text.token_texts import TokenTexts

_OBJECTS = Objects("chatcmpl-", "chat.completion", "chat.completion.chunk")
# Fields of messages whose content would be lost, and those with which others ask to continue the last message. Values
# that carry nothing are accepted.
_NOT_SUPPORTED: Neutral = {
    "function_call": (),
    "audio": (),
    "tools": ([],),
    "prefix": (False,),
    "partial": (False,),
}


def read_call(body: Body, texts: TokenTexts) -> HttpCall:
    """Returns the call that the body describes. Raises InvalidRequest."""
    request = inference_pb2.GenerateRequest()
    refuse_unsupported(body, NOT_IN_CHAT)
    params = read_messages(body, request)
    read_tools(body, request)
    options, constrained = read_shared(body, request)
    params = {"response.logprobs": "top_logprobs", **params, **constrained}
    if request.tools:  # whose calls may become a constraint
        params.setdefault("constraint.grammar", "tools")
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
    tokens = read_token_options(body, request)
    scores = PromptScores(texts, tokens, num_top=read_prompt_logprobs(body, options))
    scores.ask(request.response)
    style, *further = [ChatStyle(texts, scores, index) for index in range(request.n or 1)]
    prompt = Prompt(Incoming(request), style, params, name_in_chats, further_styles=further)
    return HttpCall(
        [prompt],
        options,
        _OBJECTS,
        further=lambda: {**scores.fields(), **scores.prompt_ids()},
        opening=scores.prompt_ids,
    )


def read_messages(body: Body, request: inference_pb2.GenerateRequest) -> dict[str, str]:
    """Reads the messages as the prompt. Returns the names in the body of the request's fields that have others there.
    Raises InvalidRequest."""
    messages = body.take("messages")
    if messages is None:
        raise InvalidRequest("messages", "is missing")
    request.messages.SetInParent()
    for name in OF_ENDINGS:
        value = body.boolean(name)
        if value is not None:
            setattr(request.messages, name, value)
    params = read_variables(body, request.messages)
    for index, entry in enumerate(as_list(messages, "messages", MAX_MESSAGES)):
        path = f"messages[{index}]"
        message = Body(as_record(entry, path), path)
        role = message.text("role") or ""
        refuse_unsupported(message, _NOT_SUPPORTED)
        entry = request.messages.messages.add(role=ROLES.get(role, role), content=_content(message, role))
        read_calls(message, entry)
        entry.tool_call_id = message.text("tool_call_id") or ""
        entry.name = message.text("name") or ""
        entry.reasoning = message.text("reasoning_content") or message.text("reasoning") or ""
    return {"prompt": "messages", "messages.continue_final_message": "continue_final_message", **params}


def _content(message: Body, role: str) -> str:
    given = message.take("content")
    if role != "assistant":
        return as_content(given, message.path("content"))
    if given is None:
        return message.text(REFUSAL) or ""
    return as_content(given, message.path("content"), ("text", REFUSAL))


class ChatStyle:
    def __init__(self, texts: TokenTexts, scores: PromptScores, index: int = 0) -> None:
        """`index` is that of its choice."""
        self._texts = texts
        self.scores = scores
        self._index = index

    def whole(self, output: inference_pb2.Chunk, ending: Ending) -> Json:
        message: Json = {"role": "assistant", "content": output.text, "refusal": None}
        if output.reasoning:
            message["reasoning_content"] = output.reasoning
        if output.tool_calls:
            message |= {"content": output.text or None, "tool_calls": calls(output)}
        choice = {"index": self._index, "message": message, "logprobs": self._logprobs(output), **ending.fields()}
        return {**choice, **self.scores.listed(output)}

    def opening(self) -> Json | None:
        return self._choice({"role": "assistant", "content": ""})

    def delta(self, chunk: inference_pb2.Chunk) -> Json | None:
        logprobs, delta = self._logprobs(chunk), Json()
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if chunk.text or (logprobs and not chunk.reasoning and not chunk.tool_calls):
            delta["content"] = chunk.text
        if chunk.tool_calls:
            delta["tool_calls"] = call_deltas(chunk.tool_calls)
        listed = self.scores.listed(chunk) if self.scores.tokens.are_listed and chunk.token_ids else {}
        return {**self._choice(delta, logprobs), **listed} if delta or listed else None

    def closing(self, ending: Ending) -> Json:
        return {**self._choice({}), **ending.fields()}

    def _logprobs(self, chunk: inference_pb2.Chunk) -> Json | None:
        if not chunk.logprobs:
            return None
        return chat_logprobs(self._texts, chunk.token_ids, chunk.logprobs, are_ids=self.scores.tokens.are_ids)

    def _choice(self, delta: Json, logprobs: Json | None = None) -> Json:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
