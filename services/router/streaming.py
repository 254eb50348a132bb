"""Tokens to text as they come: whole characters only, and nothing that may be the beginning of a stop string.

Owns: detokenisation and stop strings of one request. Never: the request itself; who drives it ends it. Whatever way the
tokens are cut into calls, the text is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
# Tokens may end within characters many times in a row, but what is still broken after so many stays broken.
_MAX_HELD_TOKENS = 32


class Detokeniser:
    """Decodes against a few tokens of context, since a token's text depends on its neighbours."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        """Tokens whose text was given last."""
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that is now certain; empty while a character is incomplete."""
        self._held.append(token_id)
        text = self._held_text()
        incomplete = not text or text.endswith(_REPLACEMENT)
        if incomplete and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        self._context, self._held = self._held, []
        return text

    def flush(self) -> str:
        """The rest, an incomplete character as U+FFFD."""
        text = self._held_text()
        self._context, self._held = self._held, []
        return text

    def _held_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._held)[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip))


class StopFinder:
    """Holds back the longest end of the text that may begin a stop string; text ends before the match."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is certain, the stop string that ended it). The first to be complete wins, then the longest."""
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
        """What was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    num_tokens: int
    """Tokens that belong to the output: all, or those up to the one that completed the stop string."""
    stop: str | None = None


class TextStream:
    """Detokenisation and stop strings together."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, stops: Sequence[str] = ()) -> None:
        self._detokeniser = Detokeniser(tokenizer, skip_special_tokens=skip_special_tokens)
        self._finder = StopFinder(stops)

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Not after a stop string was found."""
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            more, stop = self._finder.push(self._detokeniser.push(token_id))
            text += more
            if stop is not None:
                return Piece(text, count, stop)
        return Piece(text, len(token_ids))

    def flush(self) -> Piece:
        """The end of the output: what was held back, in which a stop string may still become complete."""
        text, stop = self._finder.push(self._detokeniser.flush())
        return Piece(text, 0, stop) if stop is not None else Piece(text + self._finder.flush(), 0)
