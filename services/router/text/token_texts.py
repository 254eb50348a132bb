"""Looks up the texts and bytes of a tokenizer's single tokens, for answers that list tokens. Any thread may do it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer

from services.router.text.streaming import panics_are_errors
from services.router.text.token_bounds import BYTES

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenText:
    text: str
    data: bytes


class TokenTexts:
    """Gives the texts and bytes of one tokenizer's tokens.

    A token with half a character has U+FFFD as its text, and its own bytes.
    """

    @panics_are_errors
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # Decoders drop the space at the beginning of a text, so each token is decoded after another one.
        self._anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = self._decode(self._anchor)
        self._of = functools.lru_cache(1 << 16)(self._look_up)

    @functools.cached_property
    def special(self) -> Mapping[int, str]:
        """Returns the texts of all special tokens."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {id_: token.content for id_, token in added.items() if token.special}

    def __getitem__(self, token_id: int) -> TokenText:
        return self._of(token_id)

    @panics_are_errors
    def join(self, token_ids: Iterable[int], *, with_special: bool = False) -> str:
        """Returns the text of a tokenised prompt, special tokens left out or not."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not with_special))

    @panics_are_errors
    def _look_up(self, token_id: int) -> TokenText:
        text = self._decode([*self._anchor, token_id]).removeprefix(self._anchor_text)
        if "\ufffd" not in text:
            return TokenText(text, text.encode())
        return TokenText(text, _raw(self.tokenizer.id_to_token(token_id) or text))

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))


def _raw(token: str) -> bytes:
    """Returns the bytes of a token that is no text: <0xE2>, or the characters of byte-level vocabularies."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    if all(character in BYTES for character in token):
        return bytes(BYTES[character] for character in token)
    return token.encode()
