"""Renders chat templates as Hugging Face tokenizers do: jinja2 in a sandbox, with the same helpers and trimming.

Templates come with models, so they are not trusted: the sandbox is immutable and there is no file access.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.filters
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.core.errors import InvalidRequest
from services.router.text.chat import Message, Tool

_MOST_CHARS = 1 << 20
"""The most characters that one operation of a template may make."""
_MOST_BITS = 4096


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses operations whose result would be huge: each holds the interpreter lock for as long as it runs, so a
    template could stop the whole router with `7 ** 5000000`. Operations that are intercepted are not folded at load."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and not _is_small_product(left, right):
            raise jinja2.TemplateRuntimeError("a product is too large")
        if operator == "**" and _are_ints(left, right) and _bits(left) * abs(right) > _MOST_BITS:
            raise jinja2.TemplateRuntimeError("a power is too large")
        if operator == "%" and isinstance(left, str) and _has_long_number(left):
            raise jinja2.TemplateRuntimeError("a formatted text is too large")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _has_long_number(str(value.__self__)):
            raise jinja2.TemplateRuntimeError("a formatted text is too large")
        return wrapped

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(getattr(function, "__self__", None), str | int):
            _check_numbers(*arguments, *named.values())
        return super().call(context, function, *arguments, **named)


def _are_ints(*values: Any) -> bool:
    return all(isinstance(value, int) for value in values)


def _bits(value: int) -> int:
    return max(1, value.bit_length())


def _is_small_product(left: Any, right: Any) -> bool:
    if _are_ints(left, right):
        return _bits(left) + _bits(right) <= _MOST_BITS
    for sized, times in ((left, right), (right, left)):
        if isinstance(sized, str | list | tuple) and isinstance(times, int):
            return len(sized) * times <= _MOST_CHARS
    return True


def _has_long_number(form: str) -> bool:
    """Returns whether a format has a width or precision of more than five digits, or one that its arguments give."""
    return re.search(r"\d{6}|%[^a-zA-Z%]*\*|\{[^}]*:[^}]*\{", form) is not None


def _check_numbers(*arguments: Any) -> None:
    """Raises TemplateRuntimeError for a number that says how long a text is to become, and is too large."""
    if any(isinstance(each, int) and abs(each) > _MOST_CHARS for each in arguments):
        raise jinja2.TemplateRuntimeError("a number is too large")


def _bounded(filter_: Any) -> Any:
    """Returns the filter with a check of the numbers it is given, but not of the value that it filters."""

    @functools.wraps(filter_)  # which keeps the marks by which jinja passes it what it needs besides
    def bounded(*arguments: Any, **named: Any) -> Any:
        _check_numbers(*(each for each in arguments[1:]), *named.values())
        if any(isinstance(each, str) and _has_long_number(each) for each in arguments[:2]) and filter_ is _FORMAT:
            raise jinja2.TemplateRuntimeError("a formatted text is too large")
        return filter_(*arguments, **named)

    return bounded


_FORMAT = jinja2.filters.FILTERS["format"]
_GROWING = ("batch", "center", "format", "indent", "round", "slice", "truncate", "wordwrap")


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
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are bos_token, eos_token, ... by the names that the template uses."""
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False, finalize=_as_it_is
        )
        for name in _GROWING:
            environment.filters[name] = _bounded(environment.filters[name])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opens_answer: bool = True) -> str:
        """Returns the prompt, with what opens the assistant's answer at its end or without.

        Raises InvalidRequest if the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=[_with_objects(message) for message in messages],
                tools=[_described(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=opens_answer,
                **self._special_tokens,
            )
        except Exception as error:  # an untrusted template may raise anything
            reason = str(error) or type(error).__name__
            raise InvalidRequest("messages", f"the model's chat template refuses them: {reason}") from error

    def close(self) -> None:
        """Does nothing: it keeps nothing that has to be given back."""


@jinja2.pass_context
def _as_it_is(context: Any, value: Any) -> Any:
    """Returns the value. That it asks for the context keeps jinja from computing constant output at load."""
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
