"""Reads a text that comes in pieces, for parsers that are written as if it were whole. Pure.

A parser is a generator that yields wherever it needs a character that is not there yet, and goes on with the next
piece. So it is a plain recursive descent, and cannot depend on where the pieces begin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from services.router.text.output.tags import MARKS

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a parser, which returns a T."""

MOST_BLANKS = 1024
"""The most whitespace in a row that a parser keeps to itself."""
_BLANKS = re.compile(r"\s+")


class Mismatch(Exception):
    """The text is not what the parser has looked for."""


class Reader:
    """Gives characters to a parser, and keeps those that were read but not given out yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._is_over = False
        self._held: list[str] = []

    def arrived(self, text: str) -> None:
        """Takes the next piece; the piece before has been read to its end."""
        self._text, self._at = text, 0

    def ended(self) -> None:
        self._text, self._at, self._is_over = "", 0, True

    def peek(self) -> Steps[str]:
        """Returns the next character, which stays the next; "" at the end of the text."""
        while self._at == len(self._text) and not self._is_over:
            yield
        return self._text[self._at : self._at + 1]

    def run(self, pattern: re.Pattern[str], most: int | None = None) -> str:
        """Reads what matches here, in this piece alone and at most `most` characters, and returns it without holding
        it."""
        match = pattern.match(self._text, self._at)
        return self.run_to(lambda text, at: at if match is None else match.end(), most)

    def run_to(self, end: Callable[[str, int], int], most: int | None = None) -> str:
        """Reads up to where `end` says, by this piece and the position in it, or `most` characters, and returns it
        without holding it."""
        begin, self._at = self._at, end(self._text, self._at)
        if most is not None:  # exactly, since nothing may depend on where pieces begin
            self._at = min(self._at, begin + most)
        return self._text[begin : self._at]

    def hold(self) -> None:
        """Reads the next character, which is there."""
        self._held.append(self._text[self._at])
        self._at += 1

    def holding(self, read: str) -> str:
        """Holds what was read by `run` or `run_to`."""
        self._held.append(read)
        return read

    def released(self) -> str:
        """Returns what is held, which is held no longer."""
        text = "".join(self._held)
        self._held.clear()
        return text

    def drop(self) -> None:
        """Gives up what is held."""
        self._held.clear()

    def blanks(self) -> Steps[None]:
        """Reads whitespace, as far as there is any. Raises Mismatch if there is too much."""
        num_chars = 0
        while (char := (yield from self.peek())) and char.isspace():
            if num_chars == MOST_BLANKS:
                raise Mismatch
            num_chars += len(self.holding(self.run(_BLANKS, MOST_BLANKS - num_chars)))

    def expect(self, text: str) -> Steps[None]:
        """Reads these characters. Raises Mismatch at the first that is another, which is not read."""
        for wanted in text:
            if (yield from self.peek()) != wanted:
                raise Mismatch
            self.hold()

    def tag(self, *tags: str) -> Steps[str]:
        """Reads one of these tags, as a mark or as text, and returns it. Raises Mismatch."""
        char = yield from self.peek()
        for tag in tags:
            if char == MARKS[tag]:
                self.hold()
                return tag
        at = 0
        while tags := tuple(tag for tag in tags if char and tag[at] == char):
            self.hold()
            at += 1
            if found := [tag for tag in tags if len(tag) == at]:
                return found[0]
            char = yield from self.peek()
        raise Mismatch
