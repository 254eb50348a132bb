"""Tokens as clients of logprobs see them: each with the text and the bytes it stands for, whatever its neighbours."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer

from baton.v1 import types_pb2

# JSON has no infinity; a token that was masked has it. The same bound as vLLM's.
_LEAST = -9999.0
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenText:
    text: str
    data: bytes


class TokenTexts:
    """Of one tokenizer. A token of half a character has U+FFFD as its text, and its own bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Decoders drop the space at the beginning of a text, so tokens are decoded after another one.
        self._anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = self._decode(self._anchor)
        self._of = functools.lru_cache(1 << 16)(self._look_up)

    def __getitem__(self, token_id: int) -> TokenText:
        return self._of(token_id)

    def join(self, token_ids: Iterable[int]) -> str:
        """A text as it was before it was tokenised."""
        return str(self._tokenizer.decode(list(token_ids)))

    def _look_up(self, token_id: int) -> TokenText:
        text = self._decode([*self._anchor, token_id]).removeprefix(self._anchor_text)
        if "\ufffd" not in text:
            return TokenText(text, text.encode())
        return TokenText(text, _raw(self._tokenizer.id_to_token(token_id) or text))

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


def _raw(token: str) -> bytes:
    """The bytes of a token that is no text: written as <0xE2>, or in the characters byte-level vocabularies use."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others for the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def chat_logprobs(
    texts: TokenTexts, token_ids: Iterable[int], logprobs: Iterable[types_pb2.TokenLogprobs]
) -> dict[str, object]:
    content = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        top = [_chat_entry(texts[other.token_id], other.logprob) for other in entry.top]
        content.append({**_chat_entry(texts[token_id], entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_entry(token: TokenText, logprob: float) -> dict[str, object]:
    return {"token": token.text, "logprob": max(logprob, _LEAST), "bytes": list(token.data)}


def completion_logprobs(
    texts: TokenTexts, token_ids: Iterable[int], logprobs: Iterable[types_pb2.TokenLogprobs], offset: int
) -> dict[str, list[object]]:
    """`offset`: where the first token begins in the whole text, in characters."""
    lists: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        text = texts[token_id].text
        lists["tokens"].append(text)
        lists["token_logprobs"].append(max(entry.logprob, _LEAST))
        # The likeliest of tokens with the same text counts, and the chosen one is always there.
        top = {texts[other.token_id].text: max(other.logprob, _LEAST) for other in reversed(entry.top)}
        top.setdefault(text, max(entry.logprob, _LEAST))
        lists["top_logprobs"].append(top)
        lists["text_offset"].append(offset)
        offset += len(text)
    return lists
