"""Turns tokens into text as they arrive: whole characters only, and nothing that may be the beginning of a stop string.

Owns: detokenisation and stop strings of one output, and that it is taken apart (`output`) if its form says so. Never:
the request itself; the caller ends it. The text does not depend on how the tokens are divided into calls. Stop strings
are looked for in the text as the model writes it, also in what it thinks and in calls of tools.

`tokenizers.DecodeStream` does not replace `Detokeniser`. It has only `step`, so an incomplete character at the end of
an output would be lost, and it returns nothing for 100 broken bytes in a row (tokenizers 0.23).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from services.core.ids import random_hex
from services.router.panics import panics_are_errors
from services.router.text.output.form import PLAIN, OutputForm, OutputParser
from services.router.text.output.parts import CallPart, Parsed
from services.router.text.output.tags import without_marks

_REPLACEMENT = "\ufffd"
# Tokens may end within characters many times in a row; a character still incomplete after so many stays broken.
_MAX_HELD_TOKENS = 32
# The tokens before a new one are decoded with it. Their own text is kept, so that a token costs one call of the library
# and not two, until there are so many of them: then they are as few as can be again.
_MAX_CONTEXT_TOKENS = 8


class Detokeniser:
    """Decodes tokens together with a few before them, since a token's text depends on its neighbours."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, marks: Mapping[int, str] | None = None
    ) -> None:
        """`marks` are given out in place of these special tokens, which would be skipped."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._marks = marks or {}
        self._context: list[int] = []
        """The tokens whose text was returned last."""
        self._context_text = ""
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Returns the text that is now certain; empty while a character is incomplete."""
        if token_id in self._marks:
            return self.flush() + self._marks[token_id]
        self._held.append(token_id)
        whole = self._decode(self._context + self._held)
        text = whole[len(self._context_text) :]
        incomplete = not text or text.endswith(_REPLACEMENT)
        if incomplete and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        self._returned(whole)
        return text

    def flush(self) -> str:
        """Returns the rest of the text, with an incomplete character as U+FFFD."""
        whole = self._decode(self._context + self._held)
        text = whole[len(self._context_text) :]
        self._returned(whole)
        return text

    def _returned(self, whole: str) -> None:
        """Makes the tokens that were held a part of the context. `whole` is the text of both together."""
        if len(self._context) + len(self._held) <= _MAX_CONTEXT_TOKENS:
            self._context, self._context_text = self._context + self._held, whole
        else:
            self._context, self._context_text = self._held, self._decode(self._held)
        self._held = []

    @panics_are_errors
    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip))


class StopFinder:
    """Holds back the longest end of the text that may begin a stop string; the text ends before the match."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns (text that is certain, the stop string that ended it or None).

        The stop string that is complete first wins; of several, the longest.
        """
        if not self._stops:
            return text, None
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start, stop = min(matches)
            self._held = ""
            return text[:start], stop
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """Returns the text that was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that begins `stop` without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """Holds what some tokens add to an output."""

    text: str
    num_tokens: int
    """Tokens that belong to the output: all, or those up to the one that ended it."""
    stop: str | None = None
    """The stop string that ended it."""
    has_enough: bool = False
    """The output may end with it: it has the one call of a tool that was wanted."""
    reasoning: str = ""
    calls: Sequence[CallPart] = ()
    raw: str = field(default="", compare=False)
    """The text before it was taken apart."""

    @property
    def is_last(self) -> bool:
        return self.stop is not None or self.has_enough


class TextStream:
    """Detokenises one stream of tokens, finds stop strings in it, and takes it apart."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stops: Sequence[str] = (),
        form: OutputForm = PLAIN,
        special_ids: Mapping[str, int] | None = None,
    ) -> None:
        """`special_ids` are the ids of tags that are special tokens."""
        marks = form.marks(special_ids or {}) if skip_special_tokens else {}
        self._detokeniser = Detokeniser(tokenizer, skip_special_tokens=skip_special_tokens, marks=marks)
        self._finder = StopFinder(stops)
        self._parser = None if form.is_plain else OutputParser(form, random_hex)

    @property
    def num_calls(self) -> int:
        """Returns how many calls of tools were found."""
        return 0 if self._parser is None else self._parser.num_calls

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Returns what became certain with these tokens. Do not call it after the last piece."""
        raw, parsed = "", list[Parsed]()
        for count, token_id in enumerate(token_ids, 1):
            more, stop = self._finder.push(self._detokeniser.push(token_id))
            raw += more
            if self._parser is not None:
                parsed.append(self._parser.push(more))
            if stop is not None or (self._parser is not None and self._parser.has_enough):
                if self._parser is not None:
                    parsed.append(self._parser.flush())
                return self._piece(raw, parsed, count, stop)
        return self._piece(raw, parsed, len(token_ids))

    def flush(self) -> Piece:
        """Returns the end of the output: the text held back, in which a stop string may still be completed."""
        raw, stop = self._finder.push(self._detokeniser.flush())
        if stop is None:
            raw += self._finder.flush()
        parsed = [] if self._parser is None else [self._parser.push(raw), self._parser.flush()]
        return self._piece(raw, parsed, 0, stop)

    def _piece(self, raw: str, parsed: Sequence[Parsed], num_tokens: int, stop: str | None = None) -> Piece:
        if self._parser is None:
            return Piece(raw, num_tokens, stop, raw=raw)
        total = Parsed.of(parsed)
        raw, has_enough = without_marks(raw), self._parser.has_enough
        return Piece(total.text, num_tokens, stop, has_enough, total.reasoning, total.calls, raw)
