"""Writes the grammar of outputs that have more in them than one document: what is thought, calls of tools in each
family's own form, and an answer of a given form. Pure.

The grammar is in Lark as llguidance has it, which workers compile. Where a tag is a special token it stands there by
its id. Names are letters, digits and few others, and schemas are JSON with no colon in a string, so neither can become
a rule of the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from services.router.text.output.families import NONE
from services.router.text.output.form import OutputForm
from services.router.text.output.reasoning import BEGIN, END
from services.rpc.json_schemas import JSON_OPTIONS, as_compiled

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_TEXT = "TEXT: /(.|\\n)*/"


def output_grammar(
    form: OutputForm,
    schemas: Mapping[str, Mapping[str, Any]],
    special_ids: Mapping[str, int],
    *,
    is_required: bool = False,
    is_listed: bool = True,
    answer: str | None = None,
) -> str:
    """Returns the grammar of outputs in which each call is of one of these functions, with arguments valid under its
    schema. There must be a call if `is_required`, and else there may be; what is thought comes before, and is free.

    `answer` is what an output without a call is held to (`json_answer`, `any_answer`); None if it is free. `is_listed`
    says whether a model of Mistral's writes all calls as one list.
    """
    grammar = _Grammar(form, special_ids, is_listed)
    is_held = is_required or answer is not None
    bodies, rules = list[str](), [_TEXT]
    if form.tools is not None:
        bodies.append(grammar.body(form.tools.name, is_held))
        names = [f"call_{index}" for index in range(len(schemas))]
        rules.append(f"one: {' | '.join(names)}")
        for rule, (name, schema) in zip(names, schemas.items(), strict=True):
            before, after = grammar.around(form.tools.name, name)
            rules.append(f"{rule}: {before} {rule}_arguments {after}")
            rules.append(f"{rule}_arguments: {json_answer({**schema, 'type': 'object'})}")
    if answer is not None and not is_required:
        bodies.append("answer")
        rules.append(f"answer: {answer}")
    thought = grammar.thought(is_held)
    body = f"({' | '.join(bodies)})" if len(bodies) > 1 else bodies[0]
    return "\n".join([f"start: {thought}{body}", *grammar.rules, *rules]) + "\n"


def json_answer(schema: Any) -> str:
    """Returns the rule of documents that are valid under the schema."""
    made = {**as_compiled({} if schema is True else schema), "x-guidance": JSON_OPTIONS}
    return f"%json {_without_colons(json.dumps(made, separators=(',', ':')))}"


def any_answer(texts: Iterable[str]) -> str:
    """Returns the rule of some texts."""
    return " | ".join(_without_colons(json.dumps(text)) for text in texts)


class _Grammar:
    def __init__(self, form: OutputForm, special_ids: Mapping[str, int], is_listed: bool) -> None:
        self._form = form
        self._special_ids = special_ids
        self._is_listed = is_listed
        self.rules: list[str] = []

    def body(self, family: str, is_required: bool) -> str:
        """Returns what follows what is thought: calls, or anything that may have calls in it."""
        several = not self._form.only_one_call
        match family:
            case "hermes":
                begin, end = self._tag("<tool_call>"), self._tag("</tool_call>")
                self.rules.append(f'whole: "\\n" one "\\n" {end}')
                if is_required:
                    return f"{begin} whole" + (f' ("\\n" {begin} whole)*' if several else "")
                self._until("head", "<tool_call>")
                return "(head whole)* TEXT"
            case "llama3":
                tag = "<|python_tag|>"
                calls = (f"{self._tag(tag)}? " if tag in self._special_ids else "") + "one"
                calls += ' (";" " "? one)*' if several else ""
                if is_required:
                    return calls
                self.rules.append("FREE: /[ \\t\\r\\n]*[^ \\t\\r\\n{](.|\\n)*/")
                return f'{calls} | FREE | ""'
            case _:
                return self._mistral(is_required, several)

    def around(self, family: str, name: str) -> tuple[str, str]:
        """Returns what stands before and after the arguments of a call."""
        if family == "mistral" and not self._is_listed:
            tag = "[ARGS]"
            return f"{json.dumps(name)} {self._tag(tag) if tag in self._special_ids else ''}", ""
        key = "parameters" if family == "llama3" else "arguments"
        return json.dumps(f'{{"name": "{name}", "{key}": '), '"}"'

    def thought(self, is_held: bool) -> str:
        """Returns what the model may think first. Where it may say anything, that has a place there too, unless the
        prompt has begun it."""
        if self._form.reasoning == NONE or not (self._form.is_thinking or is_held):
            return ""
        self._until("thought", END)
        self.rules.append("NEWLINES: /\\n{0,8}/")
        if self._form.is_thinking:
            return "thought NEWLINES "
        self.rules.append(f"thinking: {self._tag(BEGIN)} thought NEWLINES")
        return "thinking? "

    def _mistral(self, is_required: bool, several: bool) -> str:
        tag = "[TOOL_CALLS]"
        is_special, begin = tag in self._special_ids, self._tag(tag)
        if self._is_listed:
            first = '"[" one ' + ('(", " one)* ' if several else "") + '"]"'
            more = ""
        else:
            first, more = "one", f" ({begin} one)*" if several else ""
        if is_required:
            return f"{begin} {first}{more}"
        if is_special:
            return f"TEXT ({begin} {first}{more})?"
        self._until("head", tag)
        return f"head {first}{more} | TEXT"

    def _until(self, rule: str, tag: str) -> None:
        """Adds the rule of a text that ends with the first such tag."""
        lazily = "" if tag in self._special_ids else "[lazy]"
        self.rules.append(f"{rule}{lazily}: TEXT {self._tag(tag)}")

    def _tag(self, tag: str) -> str:
        return f"<[{self._special_ids[tag]}]>" if tag in self._special_ids else json.dumps(tag)


def _without_colons(text: str) -> str:
    """Returns JSON with none in its strings, where they could be taken for those of rules."""
    return _STRING.sub(lambda string: string[0].replace(":", "\\u003a"), text)
