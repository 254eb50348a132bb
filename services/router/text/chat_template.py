"""Renders chat templates as Hugging Face tokenizers do: jinja2 in a sandbox, with the same helpers and trimming.

Templates come with models, so they are not trusted: the sandbox is immutable and there is no file access.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.core.errors import InvalidRequest


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are bos_token, eos_token, ... by the names that the template uses."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Returns the prompt up to the assistant's answer.

        Raises InvalidRequest if the template refuses the messages.
        """
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._special_tokens)
        except Exception as error:  # an untrusted template may raise anything
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
