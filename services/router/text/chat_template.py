"""Renders chat templates as Hugging Face tokenizers do: jinja2 in a sandbox, with the same tags, filters and functions.

A template is trusted as the model is that it belongs to. What clients give it is not, so the prompt is bounded in size.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.core.errors import ConfigError, InvalidRequest
from services.router.text.chat import Message, Tool, text_bytes

_MOST_GROWTH = 4
"""Characters of a prompt for each byte of its messages and tools, at most."""
_MOST_ADDED_CHARS = 1 << 20
"""Characters of a prompt beyond these, at most."""
_MOST_INDENTED_CHARS = 16 << 20
"""Characters of one value that `tojson` indents, at most: deep nesting in a call's arguments grows a thousandfold."""


class _Generation(Extension):
    """Knows the tags `generation` and `endgeneration`, between which templates write what the assistant has said.
    Training masks the rest of a prompt by them; here they have no effect."""

    tags = {"generation"}  # noqa: RUF012 (as jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _with_objects(message: Message) -> dict[str, Any]:
    """Returns the message with the arguments of its calls as objects, which templates write as JSON again. Those that
    are no object of JSON stay the text that a model has written."""
    if "tool_calls" not in message:
        return dict(message)
    calls = [{**call, "function": {**call["function"]}} for call in message["tool_calls"]]
    for call in calls:
        text = call["function"]["arguments"]
        with contextlib.suppress(ValueError, RecursionError):  # no JSON, or absurd JSON
            arguments = json.loads(text or "{}")
            if isinstance(arguments, dict):
                call["function"]["arguments"] = arguments
    return {**message, "tool_calls": calls}


def _described(tool: Tool) -> dict[str, Any]:
    """Returns the tool in OpenAI's form, which templates expect."""
    schema = tool.get("parameters")
    parameters = json.loads(schema) if schema else {"type": "object", "properties": {}}
    description = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {"name": tool["name"], **description, "parameters": parameters}}


class ChatTemplate:
    """Renders the chats of one model. Any thread may use it, and must expect to wait."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are bos_token, eos_token, ... by the names that the template uses.

        Raises ConfigError if the source is no template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template cannot be compiled: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] = {},
        *,
        opens_answer: bool = True,
    ) -> str:
        """Returns the prompt, with what opens the assistant's answer at its end or without.

        Raises InvalidRequest if the template refuses the messages, or makes too much of them.
        """
        most_chars = _MOST_GROWTH * (text_bytes(messages) + text_bytes(tools)) + _MOST_ADDED_CHARS
        try:
            pieces = self._template.generate(
                {
                    **variables,
                    **self._special_tokens,
                    "messages": [_with_objects(message) for message in messages],
                    "tools": [_described(tool) for tool in tools] or None,
                    "documents": None,
                    "add_generation_prompt": opens_answer,
                }
            )
            prompt = "".join(_up_to(most_chars, pieces))
            prompt.encode()  # no tokenizer takes half of a surrogate pair, which JSON in a call can express
        except Exception as error:  # a template may raise anything
            reason = str(error) or type(error).__name__
            raise InvalidRequest("messages", f"the model's chat template refuses them: {reason}") from error
        return prompt


def _up_to(most_chars: int, pieces: Iterable[str]) -> Iterator[str]:
    """Yields the pieces. Raises ValueError where they become more than `most_chars` characters."""
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > most_chars:
            raise ValueError(f"it makes more than {most_chars} characters of them")
        yield piece


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    return "".join(_up_to(_MOST_INDENTED_CHARS, encoder.iterencode(value)))


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
