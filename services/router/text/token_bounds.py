"""Computes how many characters of a text one token can stand for, from the tokenizer's own description. Pure.

With it a text is refused by its length alone, before it is tokenised, if even the longest tokens were too many. Such a
refusal must never hit a text that would fit: where a part of a tokenizer may drop characters or put any number of them
into one token, there is no bound, which None says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Composition turns at most four characters into one (Unicode annex 15, on expansion by NFD).
_COMPOSED = 4
_KEEP_CHARACTERS = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")
_GROW_ONLY = ("ByteLevel", "Prepend", "NFD", "NFKD")
_COMPOSE = ("NFC", "NFKC")
_NUM_BYTES = 256
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted({*range(_NUM_BYTES)} - {*_PRINTABLE})
BYTES = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(_NUM_BYTES + index): byte for index, byte in enumerate(_OTHERS)},
}
"""Maps GPT-2's alphabet, in which byte-level vocabularies write, to bytes: printable ones stand for themselves, the
others are U+0100 and up, in order."""


@dataclass(frozen=True)
class TextBound:
    """Bounds the characters of a text that one token can stand for."""

    ascii_chars: int
    """The bound for a text that is all ASCII."""
    chars: int

    def fewest_tokens(self, text: str) -> int:
        chars = self.ascii_chars if text.isascii() else self.chars
        return -(-len(text) // chars)


def text_bound(tokenizer: Mapping[str, Any]) -> TextBound | None:
    """Returns the bound of a tokenizer.json's content, or None if a token may stand for any number of characters."""
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    composed = _normaliser(tokenizer.get("normalizer"))
    if composed is None or not _keeps(tokenizer.get("pre_tokenizer")) or not _complete(tokenizer):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):  # it takes all the spaces beside it too
        return None
    longest = max(map(len, [*model["vocab"], *(token["content"] for token in added)]), default=1)
    return TextBound(longest, longest * composed)


def _normaliser(part: Mapping[str, Any] | None) -> int | None:
    """Returns how many characters the normaliser makes one of, at most, or None if it may drop some."""
    if part is None:
        return 1
    kind = part["type"]
    if kind == "Sequence":
        product = 1
        for one in part["normalizers"]:
            factor = _normaliser(one)
            if factor is None:
                return None
            product *= factor
        return product
    if kind in _COMPOSE:
        return _COMPOSED
    if kind == "Replace":
        pattern = part["pattern"].get("String")
        return 1 if pattern is not None and len(part["content"]) >= len(pattern) else None
    return 1 if kind in _GROW_ONLY else None


def _keeps(part: Mapping[str, Any] | None) -> bool:
    """Returns whether the pre-tokenizer passes every character on to the model."""
    if part is None:
        return True
    match part["type"]:
        case "Sequence":
            return all(_keeps(one) for one in part["pretokenizers"])
        case "Split" | "Punctuation":
            return part.get("behavior") != "Removed"
        case kind:
            return kind in _KEEP_CHARACTERS


def _complete(tokenizer: Mapping[str, Any]) -> bool:
    """Returns whether every character becomes a token: none is left out, no unknown ones are merged into one."""
    model = tokenizer["model"]
    if model.get("type", "BPE") != "BPE":
        return False
    vocab = model["vocab"]
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocab for byte in range(_NUM_BYTES))
    if _has(tokenizer.get("pre_tokenizer"), "ByteLevel") or _has(tokenizer.get("normalizer"), "ByteLevel"):
        return sum(len(token) == 1 for token in vocab) >= _NUM_BYTES and BYTES.keys() <= set(vocab)
    return model.get("unk_token") is not None and not model.get("fuse_unk")


def _has(part: Mapping[str, Any] | None, kind: str) -> bool:
    if part is None:
        return False
    parts: Sequence[Mapping[str, Any]] = part.get("normalizers") or part.get("pretokenizers") or []
    return part["type"] == kind or any(_has(one, kind) for one in parts)
