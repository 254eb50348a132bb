"""Reads the body of /v1/responses into a request, and refuses by name what this server does not do.

It keeps nothing: `store` is refused if it is true, and so is whatever refers to something stored. Left out, `store` is
false, and the response says so. Types are checked here, ranges by the router's validation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import InvalidRequest
from services.router.front.call import Incoming
from services.router.front.http.answers import Writer
from services.router.front.http.body import Body, as_record, as_text, bounded
from services.router.front.http.parameters import (
    FIELDS,
    NOT_SERVED,
    OF_ENDINGS,
    Neutral,
    read_shared,
    read_text_format,
    read_variables,
    refuse_unsupported,
)
from services.router.front.http.reply import Reply
from services.router.front.http.responses.input import read_input
from services.router.front.http.responses.writer import ResponseStreamWriter, ResponseWriter
from services.router.front.http.tools import read_tools
from services.router.text.token_texts import TokenTexts

MAX_METADATA = 16
MAX_METADATA_CHARS = (64, 512)
"""The most characters of a key and of a value: OpenAI's bounds."""

NOT_IN_RESPONSES: Neutral = {
    **NOT_SERVED,
    **OF_ENDINGS,
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "prompt": (),
    "top_logprobs": (0,),
    "moderation": (),
    "context_management": ([],),
    "service_tier": ("auto", "default"),
    # Fields of the other endpoints, which would change an answer.
    "messages": (),
    "n": (1,),
    "best_of": (0, 1),
    "max_tokens": (),
    "max_completion_tokens": (),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "echo": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    **dict.fromkeys(FIELDS, ()),
    "response_format": ({"type": "text"},),
}
_NOT_IN_REASONING: Neutral = {"effort": ("medium",), "summary": ("auto",), "generate_summary": ("auto",)}
_NOT_IN_TEXT: Neutral = {"verbosity": ("medium",)}


@dataclass(frozen=True)
class ResponsePrompt:
    incoming: Incoming
    params: Mapping[str, str]
    """The request's field names in the body, where they differ."""
    rename: Callable[[str], str] = str


@dataclass(frozen=True)
class ResponseCall:
    """Describes a call of /v1/responses. It is an `EndpointCall`."""

    prompts: Sequence[ResponsePrompt]
    is_stream: bool
    echoed: Mapping[str, Any]
    """Fields of the response that tell what was asked for."""

    def writer(self, request_id: str, model_id: str, reply: Reply) -> Writer:
        kind = ResponseStreamWriter if self.is_stream else ResponseWriter
        return kind(self.echoed, request_id, model_id, reply)


def read_call(body: Body, texts: TokenTexts) -> ResponseCall:
    """Returns the call that the body describes. Raises InvalidRequest."""
    refuse_unsupported(body, NOT_IN_RESPONSES)
    request = inference_pb2.GenerateRequest()
    request.messages.SetInParent()
    params = {"prompt": "input", "messages": "input", "stopping.max_tokens": "max_output_tokens"}
    params |= read_input(body, request.messages)
    params |= read_variables(body, request.messages)
    options, shared = read_shared(body, request)
    params |= shared
    max_tokens = body.whole("max_output_tokens")
    if max_tokens is not None:
        request.stopping.max_tokens = max_tokens
    reasoning = body.record("reasoning")
    refuse_unsupported(reasoning, _NOT_IN_REASONING)
    read_tools(body, request, is_flat=True)
    if request.tools:  # whose calls may become a constraint
        params.setdefault("constraint.grammar", "tools")
    for index in range(len(request.tools)):
        params[f"tools[{index}].parameters_schema"] = f"tools[{index}].parameters"
    params |= {"tool_choice.function": "tool_choice.name", "tool_choice.allowed": "tool_choice.tools"}
    text = body.record("text")
    refuse_unsupported(text, _NOT_IN_TEXT)
    constraint, wanted = types_pb2.Constraint(), text.take("format")
    if wanted is not None and (formatted := read_text_format(text.record("format"), constraint)):
        request.constraint.CopyFrom(constraint)
        params |= formatted
    return ResponseCall(
        [ResponsePrompt(Incoming(request), params)],
        options.stream,
        {
            "background": False,
            "instructions": body.take("instructions"),
            "max_output_tokens": max_tokens,
            "max_tool_calls": body.whole("max_tool_calls"),  # of tools that the server runs: there are none
            "metadata": _metadata(body),
            "parallel_tool_calls": body.boolean("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {name: reasoning.take(name) for name in ("effort", "summary")},
            "service_tier": "default",
            "store": False,
            "temperature": _or_one(body.number("temperature")),
            "text": {"format": wanted or {"type": "text"}},
            "tool_choice": body.take("tool_choice") or "auto",
            "tools": body.take("tools") or [],
            "top_logprobs": 0,
            "top_p": _or_one(body.number("top_p")),
            "truncation": "disabled",
            "user": body.text("user"),
        },
    )


def _or_one(number: float | None) -> float:
    return 1.0 if number is None else number


def _metadata(body: Body) -> dict[str, str]:
    value = body.take("metadata")
    pairs = {} if value is None else as_record(value, "metadata")
    bounded(pairs, "metadata", MAX_METADATA)
    most_key, most_value = MAX_METADATA_CHARS
    for key, text in pairs.items():
        place = f"metadata.{key[:most_key]}"
        if len(as_text(key, "metadata")) > most_key or len(as_text(text, place)) > most_value:
            raise InvalidRequest(place, f"must have at most {most_key} characters, and its value {most_value}")
    return dict(pairs)
