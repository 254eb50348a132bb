"""Computes how much longer the parts of a tokenizer may make a text, from the tokenizer's own description. Pure.

A tokenizer.json names its parts by kind, in the form that the `tokenizers` library writes. Each kind that library
version 0.23 has is known here, with the most that it makes of one character. A few nested replacements would make
gigabytes of a token, in a call that cannot be stopped.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

TokenizerPart = Mapping[str, Any]

_COMPATIBLE = 18
"""The most characters that a character becomes under NFKC and NFKD (U+FDFA; Unicode annex 15, expansion factors)."""
_NORMALISERS = {
    "BertNormalizer": 24,  # blanks beside it, its accents apart, and two lower-case letters for one
    "ByteLevel": 4,
    "Lowercase": 2,
    "NFC": 3,
    "NFD": 4,
    "NFKC": _COMPATIBLE,
    "NFKD": _COMPATIBLE,
    "Nmt": 1,
    "Strip": 1,
    "StripAccents": 1,
}
_PRE_TOKENISERS = {
    "BertPreTokenizer": 1,
    "ByteLevel": 8,  # four bytes, and a blank before them
    "CharDelimiterSplit": 1,
    "Digits": 1,
    "FixedLength": 1,
    "Metaspace": 2,
    "Punctuation": 1,
    "Split": 1,
    "UnicodeScripts": 1,
    "Whitespace": 1,
    "WhitespaceSplit": 1,
}
_DECODERS = {
    "ByteFallback": 1,
    "ByteLevel": 1,
    "Fuse": 1,
    "Metaspace": 1,
    "Strip": 1,
    "WordPiece": 2,  # a blank before each token
}
_NESTED = ("normalizers", "pretokenizers", "decoders", "processors")


class UnknownPart(ValueError):
    """The description has a kind of part that is not known here. The message names it."""


def normaliser_growth(part: TokenizerPart | None) -> float:
    """Returns how many times as long a normaliser may make a text."""
    return math.prod(_normaliser(one) for one in leaves(part))


def pre_tokeniser_growth(part: TokenizerPart | None) -> float:
    """Returns how many times as long a pre-tokenizer may make a text."""
    return math.prod(_known(_PRE_TOKENISERS, one) for one in leaves(part))


def decoder_growth(part: TokenizerPart | None) -> float:
    """Returns how many times as long as the tokens' entries a decoder may make the text of them."""
    return math.prod(_decoder(one) for one in leaves(part))


def num_added(part: TokenizerPart | None) -> float:
    """Returns how many tokens a post-processor may add to a text's own; infinity if it may repeat those."""
    return sum(_processor(one) for one in leaves(part))


def leaves(part: TokenizerPart | None) -> Iterator[TokenizerPart]:
    """Yields the parts that are no sequences of others, in their order."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for name in _NESTED:
        for one in part.get(name) or ():
            yield from leaves(one)


def has_expression(part: TokenizerPart | None) -> bool:
    """Returns whether a part searches for a regular expression, which may take any time."""
    return any("Regex" in (one.get("pattern") or ()) for one in leaves(part))


def _known(kinds: Mapping[str, int], part: TokenizerPart) -> float:
    if part["type"] not in kinds:
        raise UnknownPart(f"its part {str(part['type'])[:40]!r} is not known")
    return kinds[part["type"]]


def _normaliser(part: TokenizerPart) -> float:
    match part["type"]:
        case "Replace":
            return _replacement(part)
        case "Prepend":  # to each piece of text between two added tokens, however short
            return 1.0 + len(part["prepend"])
        case "Precompiled":
            return _charsmap(part["precompiled_charsmap"])
        case _:
            return _known(_NORMALISERS, part)


def _decoder(part: TokenizerPart) -> float:
    match part["type"]:
        case "Replace":
            return _replacement(part)
        case "BPEDecoder":  # replaces the suffix by a blank: one that is empty is everywhere
            return 1.0 if part["suffix"] else 3.0
        case "CTC":
            return 1.0 if part["word_delimiter_token"] else 3.0
        case _:
            return _known(_DECODERS, part)


def _replacement(part: TokenizerPart) -> float:
    replaced = len(part["pattern"].get("String", ""))  # an expression may match nothing, between any two characters
    return max(1.0, len(part["content"]) / replaced if replaced else 1.0 + len(part["content"]))


def _charsmap(encoded: str) -> float:
    """Returns the length of the longest replacement in a SentencePiece charsmap: the size of a trie, the trie, then the
    replacements, each with a zero at its end."""
    try:
        data = base64.b64decode(encoded)
    except binascii.Error:
        raise UnknownPart("its charsmap cannot be read") from None
    replacements = data[4 + int.from_bytes(data[:4], "little") :]
    return max([1.0, *(float(len(each)) for each in replacements.split(b"\0"))])


def _processor(part: TokenizerPart) -> float:
    match part["type"]:
        case "ByteLevel":
            return 0.0
        case "BertProcessing" | "RobertaProcessing":
            return 4.0
        case "TemplateProcessing":
            return max(_added_by(part, part["single"]), _added_by(part, part["pair"]))
        case kind:
            raise UnknownPart(f"its part {str(kind)[:40]!r} is not known")


def _added_by(part: TokenizerPart, pieces: Sequence[Mapping[str, Any]]) -> float:
    texts = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
    if len(set(texts)) < len(texts):
        return math.inf
    named = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
    return float(sum(len(part["special_tokens"][name]["ids"]) for name in named))
