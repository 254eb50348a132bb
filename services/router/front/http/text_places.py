"""Finds where tokens begin in the text of an answer, which leaves out some of them.

The text comes later than its tokens while a character or a possible stop string is incomplete, and the tokens of a
character begin where it does. A token whose text is left out begins where the next one does.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterable, Sequence

from services.router.text.streaming import CONTEXT_TOKENS, Detokeniser, num_begun
from services.router.text.token_texts import TokenTexts


class TextPlaces:
    """Finds the places of one answer's tokens, the prompt's first if the text begins with it."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._detokeniser = Detokeniser(texts.tokenizer, skip_special_tokens=False)
        self._waiting = collections.deque[tuple[int, str]]()
        """The tokens whose places are not told yet, with what they add to the text."""
        self._at = 0

    def continues(self, prompt: Sequence[int]) -> None:
        """Takes the prompt that the tokens follow, of which nothing is in the text."""
        whole = prompt[: len(prompt) - num_begun(self._texts.tokenizer, prompt)]
        before = whole[-CONTEXT_TOKENS:]
        self._detokeniser = Detokeniser(self._texts.tokenizer, skip_special_tokens=False, before=before)

    def add(self, token_ids: Iterable[int]) -> None:
        self._waiting += [(token_id, self._detokeniser.push(token_id)) for token_id in token_ids]

    def copy(self) -> TextPlaces:
        """Returns another that has the same tokens so far."""
        other = copy.copy(self)
        other._detokeniser, other._waiting = copy.copy(self._detokeniser), self._waiting.copy()
        return other

    def told(self, text: str, *, is_whole: bool) -> list[int]:
        """Returns the places of the tokens, after those that were told before, whose text has come: of all if the text
        is whole. They are characters from the text's beginning."""
        places = []
        while self._waiting:
            token_id, piece = self._waiting[0]
            if not text.startswith(piece, self._at):
                if token_id in self._texts.special:
                    piece = ""
                elif not is_whole and len(text) < self._at + len(piece):
                    break
            places.append(self._at)
            self._at = min(self._at + len(piece), len(text))
            self._waiting.popleft()
        return places
