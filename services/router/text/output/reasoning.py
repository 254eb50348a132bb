"""Tells what a model thinks from what it answers: `<think>…</think>` at the beginning of its output. Pure.

Many chat templates open this part themselves: then the output begins within it, and only the end tag appears. Newlines
next to a tag are its own: templates write them around it.
"""

from __future__ import annotations

import re

from services.router.text.output.reader import Mismatch, Reader, Steps
from services.router.text.output.tags import MARKS

BEGIN, END = "<think>", "</think>"
_MOST_NEWLINES = 64
_THOUGHT = re.compile(f"[^\n<{MARKS[END]}]+")
_ALL = re.compile(r".+", re.DOTALL)


class ReasoningParser:
    """Parses one output. Give it each piece in order, then `flush`."""

    def __init__(self, *, opened: bool) -> None:
        """`opened` says that the prompt ends within the part that is thought."""
        self._reader = Reader()
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self.is_thinking = opened
        """Whether what comes next is thought, as far as is known."""
        self._steps = self._run(opened)
        next(self._steps)

    def push(self, text: str) -> tuple[str, str]:
        """Returns what this piece adds to what is thought, and to the rest."""
        self._reader.arrived(text)
        next(self._steps)
        return self._taken()

    def flush(self) -> tuple[str, str]:
        """Returns what was held back, when the output has ended."""
        self._reader.ended()
        next(self._steps, None)
        return self._taken()

    def _taken(self) -> tuple[str, str]:
        reasoning, text = "".join(self._reasoning), "".join(self._text)
        self._reasoning.clear()
        self._text.clear()
        return reasoning, text

    def _run(self, opened: bool) -> Steps[None]:
        reader = self._reader
        yield
        tag = yield from self._first_tag(opened)
        self.is_thinking = tag == BEGIN or (opened and not tag)
        if tag:
            yield from self._newlines()
        if self.is_thinking:
            if not tag:
                self._reasoning.append(reader.released().lstrip("\n"))
            yield from self._think()
        self._text.append(reader.released())
        while (yield from reader.peek()):
            self._text.append(reader.run(_ALL))

    def _first_tag(self, opened: bool) -> Steps[str]:
        """Reads the first tag, with blanks before it. Returns "" if there is none, with what was read held. Only in a
        part that the prompt has opened may it be the end tag."""
        try:
            yield from self._reader.blanks()
            tag = yield from self._reader.tag(*((BEGIN, END) if opened else (BEGIN,)))
        except Mismatch:
            return ""
        self._reader.drop()
        return tag

    def _newlines(self) -> Steps[None]:
        reader = self._reader
        while (yield from reader.peek()) == "\n":
            reader.hold()
            reader.drop()

    def _think(self) -> Steps[None]:
        """Reads to the end tag and the newlines after it; newlines before it are held until it is clear that there is
        more to come."""
        reader, num_newlines = self._reader, 0
        while char := (yield from reader.peek()):
            if char == "\n":
                reader.hold()
                num_newlines += 1
                if num_newlines == _MOST_NEWLINES:
                    self._reasoning.append(reader.released())
                    num_newlines = 0
                continue
            if char in (END[0], MARKS[END]):
                try:
                    yield from reader.tag(END)
                except Mismatch:
                    self._reasoning.append(reader.released())
                    num_newlines = 0
                    continue
                reader.drop()
                self.is_thinking = False
                yield from self._newlines()
                return
            self._reasoning.append(reader.released() + reader.run(_THOUGHT))
            num_newlines = 0
        self._reasoning.append(reader.released())
