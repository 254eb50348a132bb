"""Knows in which forms models call tools and think, and tells from a chat template which of them a model uses. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from services.router.text.output.calls import CallParser, HermesCalls, LlamaCalls, MistralCalls

NONE = "none"
_KNOWS_TOOLS = re.compile(r"\btools\b")
_OTHER_TOOL_CALLS = ("<function=", "<arg_key>", "<parameter=")
"""Parts of forms that have Hermes' tags, and no JSON within them."""


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """Describes a form of calls."""

    name: str
    parser: type[CallParser]
    tags: tuple[str, ...]
    """Those that may be special tokens."""
    id_prefix: str = "call_"
    id_chars: int = 24
    """How many hexadecimal digits of chance are in the id of a call, after the prefix."""
    is_document: bool = False
    """A call begins as any object of JSON does, so an output cannot be held to calls or a document."""

    def call_id(self, random_hex: Callable[[int], str]) -> str:
        return self.id_prefix + random_hex(self.id_chars)


TOOL_FAMILIES = {
    family.name: family
    for family in (
        ToolFamily("hermes", HermesCalls, ("<tool_call>", "</tool_call>")),
        ToolFamily("llama3", LlamaCalls, ("<|python_tag|>",), is_document=True),
        # Its templates refuse ids of any other form.
        ToolFamily("mistral", MistralCalls, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), "", 9),
    )
}
REASONING_TAGS = {"think": ("<think>", "</think>")}
TOOL_PARSERS = (*TOOL_FAMILIES, NONE)
REASONING_PARSERS = (*REASONING_TAGS, NONE)


def knows_tools(template: str) -> bool:
    """Returns whether a chat template would tell the model of tools."""
    return _KNOWS_TOOLS.search(template) is not None


def tool_family_of(template: str) -> str:
    """Returns the name of the form in which a model with this template calls tools; "none" for no known form."""
    if not knows_tools(template):
        return NONE
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and not any(part in template for part in _OTHER_TOOL_CALLS):
        return "hermes"
    if "<|python_tag|>" in template or '{"name": function name, "parameters":' in template:
        return "llama3"
    return NONE


def reasoning_of(template: str) -> str:
    """Returns the name of the form in which a model with this template thinks; "none" for no known form."""
    return "think" if "</think>" in template else NONE


@dataclass(frozen=True, slots=True)
class ModelForms:
    """Says in which forms one model's outputs are taken apart."""

    knows_tools: bool = False
    """Its chat template tells it of tools."""
    tools: ToolFamily | None = None
    reasoning: str = NONE
    lists_calls: bool = True
    """All calls of an output are one list, in Mistral's form."""
    only_one_call: bool = False
    """Its chat template refuses messages with several calls, as Llama 3's does, so outputs have one."""

    @property
    def tools_name(self) -> str:
        return NONE if self.tools is None else self.tools.name


PLAIN_FORMS = ModelForms()


def forms_of(template: str, tool_parser: str | None, reasoning_parser: str | None) -> ModelForms:
    """Returns the forms of a model with this chat template; None for a parser leaves its choice to the template."""
    tools = tool_family_of(template) if tool_parser is None else tool_parser
    reasoning = reasoning_of(template) if reasoning_parser is None else reasoning_parser
    only_one = "single tool-calls" in template
    return ModelForms(knows_tools(template), TOOL_FAMILIES.get(tools), reasoning, "[ARGS]" not in template, only_one)
