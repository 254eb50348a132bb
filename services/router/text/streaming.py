"""Turns tokens into text as they arrive: whole characters only, and nothing that may be the beginning of a stop string.

Owns: detokenisation and stop strings of one request. Never: the request itself; the caller ends it. The text does not
depend on how the tokens are divided into calls.

`tokenizers.DecodeStream` does not replace `Detokeniser`. It has only `step`, so an incomplete character at the end of
an output would be lost, and it returns nothing for 100 broken bytes in a row (tokenizers 0.23).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from services.router.panics import panics_are_errors

_REPLACEMENT = "\ufffd"
# Tokens may end within characters many times in a row; a character still incomplete after so many stays broken.
_MAX_HELD_TOKENS = 32


class Detokeniser:
    """Decodes tokens together with a few before them, since a token's text depends on its neighbours."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        """The tokens whose text was returned last."""
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Returns the text that is now certain; empty while a character is incomplete."""
        self._held.append(token_id)
        text = self._held_text()
        incomplete = not text or text.endswith(_REPLACEMENT)
        if incomplete and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        self._context, self._held = self._held, []
        return text

    def flush(self) -> str:
        """Returns the rest of the text, with an incomplete character as U+FFFD."""
        text = self._held_text()
        self._context, self._held = self._held, []
        return text

    def _held_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._held)[len(before) :]

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
    text: str
    num_tokens: int
    """Tokens that belong to the output: all, or those up to the one that completed the stop string."""
    stop: str | None = None


class TextStream:
    """Detokenises and finds stop strings in one stream of tokens."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, stops: Sequence[str] = ()) -> None:
        self._detokeniser = Detokeniser(tokenizer, skip_special_tokens=skip_special_tokens)
        self._finder = StopFinder(stops)

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Returns the text that became certain with these tokens. Do not call it after a stop string was found."""
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            more, stop = self._finder.push(self._detokeniser.push(token_id))
            text += more
            if stop is not None:
                return Piece(text, count, stop)
        return Piece(text, len(token_ids))

    def flush(self) -> Piece:
        """Returns the end of the output: the text held back, in which a stop string may still be completed."""
        text, stop = self._finder.push(self._detokeniser.flush())
        return Piece(text, 0, stop) if stop is not None else Piece(text + self._finder.flush(), 0)
