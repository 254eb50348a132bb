"""Finds calls of tools in what a model answers, in the forms of several families. Pure.

A call is given out from where it is certain to be one: its name is that of a function that the model was told of, and
an object of arguments has begun. From there on its arguments are given out as they come, as the model wrote them, up to
the bracket that closes them. Whatever looks like a call and is none by then is text, and so is what follows arguments
where a call should go on. Whitespace next to a call is the form's and not the text's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from services.router.text.output.parts import CallPart, Parsed
from services.router.text.output.reader import Mismatch, Reader, Steps
from services.router.text.output.tags import MARKS

MOST_STRING_CHARS = 512
"""The longest key, name or id in a call, as JSON text."""
MOST_HELD_CHARS = 1 << 20
"""The longest arguments that may come before the name: they are held back until it is known."""
NO_ARGUMENTS = "{}"
_ARGUMENTS = ("arguments", "parameters")
_LABELS = ("id", "type")
_NAME = re.compile(r"[\w.-]+", re.ASCII)
_BRACKET = re.compile(r'["\\{}\[\]]')
_PLAIN = re.compile(r"[^\s<\[{%s]+" % "".join(MARKS.values()))  # noqa: UP031  # braces
_ONE = re.compile(r".", re.DOTALL)


class CallParser:
    """Parses one output. Give it each piece in order, then `flush`. `_call`, of each family, reads what may be calls,
    from their first character, and raises Mismatch where they stop being that."""

    def __init__(
        self, names: Collection[str], new_id: Callable[[], str], *, only_one: bool = False, only_calls: bool = False
    ) -> None:
        """`names` are the functions that may be called; `new_id` draws the id of a call. With `only_one` nothing is
        read after the first. With `only_calls` nothing is text: what is no call was cut off before it became one."""
        self._names = names
        self._new_id = new_id
        self._only_one = only_one
        self._only_calls = only_calls
        self._reader = Reader()
        self._text: list[str] = []
        self._parts: list[CallPart] = []
        self.num_calls = 0
        self.has_enough = False
        """The first call is complete, and no other is wanted."""
        self._has_text = False
        self._steps = self._run()
        next(self._steps)

    def push(self, text: str) -> Parsed:
        """Returns what this piece adds."""
        self._reader.arrived(text)
        next(self._steps, None)
        return self._taken()

    def flush(self) -> Parsed:
        """Returns what was held back, when the output has ended."""
        self._reader.ended()
        next(self._steps, None)
        return self._taken()

    def _taken(self) -> Parsed:
        parsed = Parsed.of([Parsed(text="".join(self._text), calls=self._parts)])
        self._text, self._parts = [], []
        return parsed

    def _run(self) -> Steps[None]:
        reader = self._reader
        yield
        while char := (yield from reader.peek()):
            if char.isspace():
                try:
                    yield from reader.blanks()
                except Mismatch:
                    self._give(reader.released())
            elif self._may_begin(char):
                try:
                    yield from self._call(char)
                except Mismatch:
                    self._give(reader.released())
                if self.has_enough:
                    reader.drop()
                    return
            else:
                self._give(reader.released() + (reader.run(_PLAIN) or reader.run(_ONE)))
        rest = reader.released()
        if not self.num_calls or not rest.isspace():
            self._give(rest)

    def _give(self, text: str) -> None:
        if self._only_calls:
            return
        self._has_text = self._has_text or bool(text)
        self._text.append(text)

    def _may_begin(self, char: str) -> bool:
        """Returns whether a call may begin with this character here."""
        raise NotImplementedError

    def _call(self, char: str) -> Steps[None]:
        raise NotImplementedError
        yield

    # What the families' forms have in common

    def _object(self, *, needs_arguments: bool = False) -> Steps[None]:
        """Reads {"name": …, "arguments": {…}}, in whatever order, perhaps with an id or a type. Without arguments they
        are empty, unless they are needed."""
        reader, seen = self._reader, set[str]()
        name, arguments, begun = "", "", False
        yield from reader.expect("{")
        while True:
            yield from reader.blanks()
            key = yield from self._string()
            yield from reader.blanks()
            yield from reader.expect(":")
            yield from reader.blanks()
            kind = "arguments" if key in _ARGUMENTS else key
            if kind in seen:
                raise Mismatch
            seen.add(kind)
            if kind == "name":
                name = yield from self._string()
                if name not in self._names:
                    raise Mismatch
                if arguments:
                    self._begin(name)
                    self._add(arguments)
                    begun = True
            elif kind == "arguments":
                if (yield from reader.peek()) != "{":
                    raise Mismatch
                if name:
                    self._begin(name)
                    begun = True
                    yield from self._arguments()
                else:
                    arguments = yield from self._early_arguments()
            elif key in _LABELS:
                yield from self._string()
            else:
                raise Mismatch
            yield from reader.blanks()
            if (yield from reader.peek()) != ",":
                break
            reader.hold()
        yield from reader.expect("}")
        if not begun:
            if not name or needs_arguments:
                raise Mismatch
            self._begin(name)
            self._add(NO_ARGUMENTS)
        self._complete()

    def _begin(self, name: str) -> None:
        """Gives out that there is a call. What is held belongs to it."""
        self._reader.drop()
        self._parts.append(CallPart(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def _add(self, arguments: str) -> None:
        self._parts.append(CallPart(self.num_calls - 1, arguments=arguments))

    def _complete(self) -> None:
        """Notes that the call has been read to its end."""
        self._reader.drop()
        self.has_enough = self._only_one

    def _string(self) -> Steps[str]:
        """Reads a string of JSON and returns what it says."""
        reader, raw, escaped = self._reader, ['"'], False
        yield from reader.expect('"')
        while len(raw) <= MOST_STRING_CHARS:
            char = yield from reader.peek()
            if not char:
                raise Mismatch
            reader.hold()
            raw.append(char)
            if char == '"' and not escaped:
                try:
                    return str(json.loads("".join(raw)))
                except ValueError:
                    raise Mismatch from None
            escaped = char == "\\" and not escaped
        raise Mismatch

    def _arguments(self) -> Steps[None]:
        """Reads an object and gives it out as it comes. It ends with the text, at the latest."""
        extent = _Extent()
        while (yield from self._reader.peek()):
            self._add(self._reader.run_to(extent.end))
            if extent.is_whole:
                return

    def _early_arguments(self) -> Steps[str]:
        extent, parts, num_chars = _Extent(), list[str](), 0
        while (yield from self._reader.peek()):
            parts.append(self._reader.holding(self._reader.run_to(extent.end, MOST_HELD_CHARS - num_chars)))
            num_chars += len(parts[-1])
            if num_chars == MOST_HELD_CHARS:
                break
            if extent.is_whole:
                return "".join(parts)
        raise Mismatch


class _Extent:
    """Finds where an object of JSON ends, by its brackets and strings alone."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_whole = False

    def end(self, text: str, at: int) -> int:
        """Returns the position after the object in this piece of it, which begins at `at`, or the piece's end."""
        if self._is_escaped and at < len(text):
            self._is_escaped, at = False, at + 1
        while (match := _BRACKET.search(text, at)) is not None:
            char, at = match[0], match.end()
            if char == "\\":
                if self._in_string and at == len(text):
                    self._is_escaped = True
                elif self._in_string:
                    at += 1
            elif char == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if char in "{[" else -1
                if self._depth <= 0:
                    self.is_whole = True
                    return at
        return len(text)


class HermesCalls(CallParser):
    """Parses `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once for each call, as Hermes and Qwen do."""

    def _may_begin(self, char: str) -> bool:
        return char in ("<", MARKS["<tool_call>"])

    def _call(self, char: str) -> Steps[None]:
        reader = self._reader
        tag = yield from reader.tag("<tool_call>")
        while tag == "<tool_call>":
            yield from reader.blanks()
            yield from self._object()
            if self.has_enough:
                return
            yield from reader.blanks()
            tag = yield from reader.tag("</tool_call>", "<tool_call>")
        reader.drop()


class LlamaCalls(CallParser):
    """Parses `{"name": …, "parameters": {…}}`, at the beginning of an answer or after `<|python_tag|>`, as Llama 3
    writes it; several have semicolons between them."""

    def _may_begin(self, char: str) -> bool:
        return char in ("<", MARKS["<|python_tag|>"]) or (char == "{" and not self._has_text and not self.num_calls)

    def _call(self, char: str) -> Steps[None]:
        reader = self._reader
        if char != "{":
            yield from reader.tag("<|python_tag|>")
            yield from reader.blanks()
        yield from self._object(needs_arguments=char == "{")
        while not self.has_enough:
            yield from reader.blanks()
            if (yield from reader.peek()) == ";":
                reader.hold()
                yield from reader.blanks()
            elif (yield from reader.peek()) != "{":
                return
            yield from self._object(needs_arguments=True)


class MistralCalls(CallParser):
    """Parses `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and `[TOOL_CALLS]name{…}`, once for each call, as newer
    models of Mistral's write it, some with `[CALL_ID]` and `[ARGS]` in between."""

    def _may_begin(self, char: str) -> bool:
        return char in ("[", MARKS["[TOOL_CALLS]"])

    def _call(self, char: str) -> Steps[None]:
        reader = self._reader
        yield from reader.tag("[TOOL_CALLS]")
        yield from reader.blanks()
        char = yield from reader.peek()
        if char == "[":
            yield from self._list()
        elif char == "{":
            yield from self._object()
        else:
            yield from self._named()

    def _list(self) -> Steps[None]:
        reader, separator = self._reader, "["
        while True:
            yield from reader.expect(separator)
            yield from reader.blanks()
            yield from self._object()
            if self.has_enough:
                return
            yield from reader.blanks()
            if (yield from reader.peek()) == "]":
                reader.hold()
                reader.drop()
                return
            separator = ","

    def _named(self) -> Steps[None]:
        reader = self._reader
        name = yield from self._word()
        if name not in self._names:
            raise Mismatch
        if (yield from reader.peek()) in ("[", MARKS["[CALL_ID]"], MARKS["[ARGS]"]):
            yield from self._inner_tags()
        yield from reader.blanks()
        if (yield from reader.peek()) != "{":
            raise Mismatch
        self._begin(name)
        yield from self._arguments()
        self._complete()

    def _inner_tags(self) -> Steps[None]:
        """Reads `[CALL_ID]` with an id, `[ARGS]`, or both."""
        reader = self._reader
        char = yield from reader.peek()
        if char == "[":
            reader.hold()
            char = yield from reader.peek()
            tag = "[CALL_ID]" if char == "C" else "[ARGS]"
            yield from reader.expect(tag[1:])
        else:
            tag = "[CALL_ID]" if char == MARKS["[CALL_ID]"] else "[ARGS]"
            yield from reader.tag(tag)
        if tag == "[CALL_ID]":
            yield from self._word()
            yield from reader.tag("[ARGS]")

    def _word(self) -> Steps[str]:
        reader, word = self._reader, ""
        while (yield from reader.peek()):
            part = reader.holding(reader.run(_NAME, MOST_STRING_CHARS - len(word)))
            word += part
            if not part:
                break
        return word
