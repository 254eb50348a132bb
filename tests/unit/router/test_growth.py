"""Tests how much longer a tokenizer's parts make texts: never more than is computed from their description."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from services.router.text import growth
from services.router.text.growth import UnknownPart

NORMALISERS = {
    "BertNormalizer": normalizers.BertNormalizer(),
    "ByteLevel": normalizers.ByteLevel(),
    "Lowercase": normalizers.Lowercase(),
    "NFC": normalizers.NFC(),
    "NFD": normalizers.NFD(),
    "NFKC": normalizers.NFKC(),
    "NFKD": normalizers.NFKD(),
    "Nmt": normalizers.Nmt(),
    "Prepend": normalizers.Prepend("abc"),
    "Replace": normalizers.Replace("a", "bcd"),
    "Sequence": normalizers.Sequence([normalizers.Replace("a", "bb"), normalizers.NFKD(), normalizers.Prepend("_")]),
    "Strip": normalizers.Strip(),
    "StripAccents": normalizers.StripAccents(),
}
PRE_TOKENISERS = {
    "BertPreTokenizer": pre_tokenizers.BertPreTokenizer(),
    "ByteLevel": pre_tokenizers.ByteLevel(),
    "CharDelimiterSplit": pre_tokenizers.CharDelimiterSplit("a"),
    "Digits": pre_tokenizers.Digits(),
    "FixedLength": pre_tokenizers.FixedLength(3),
    "Metaspace": pre_tokenizers.Metaspace(),
    "Punctuation": pre_tokenizers.Punctuation(),
    "Sequence": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel()]),
    "Split": pre_tokenizers.Split("a", "isolated"),
    "UnicodeScripts": pre_tokenizers.UnicodeScripts(),
    "Whitespace": pre_tokenizers.Whitespace(),
    "WhitespaceSplit": pre_tokenizers.WhitespaceSplit(),
}
DECODERS = {
    "BPEDecoder": decoders.BPEDecoder(),
    "BPEDecoder, empty": decoders.BPEDecoder(""),
    "ByteFallback": decoders.ByteFallback(),
    "ByteLevel": decoders.ByteLevel(),
    "CTC": decoders.CTC(),
    "CTC, empty": decoders.CTC(word_delimiter_token=""),
    "Fuse": decoders.Fuse(),
    "Metaspace": decoders.Metaspace(),
    "Replace": decoders.Replace("a", "bcd"),
    "Sequence": decoders.Sequence([decoders.Replace("a", "bb"), decoders.Replace("b", "ccc")]),
    "Strip": decoders.Strip("a", 1, 0),
    "WordPiece": decoders.WordPiece(),
}
TEXTS = st.text(
    st.sampled_from("aAbİ \n1.字é\u0301\u1f82\ufdfa\U0001d160🙂") | st.characters(codec="utf-8"), max_size=40
)


def described(**parts: Any) -> Any:
    tokenizer = Tokenizer(models.BPE())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return json.loads(tokenizer.to_str())


@pytest.mark.parametrize("name", NORMALISERS)
def test_no_normaliser_makes_a_text_longer_than_computed(name: str) -> None:
    normaliser = NORMALISERS[name]
    most = growth.normaliser_growth(described(normalizer=normaliser)["normalizer"])

    @given(TEXTS.filter(bool))
    def holds(text: str) -> None:
        assert len(normaliser.normalize_str(text)) <= most * len(text)

    holds()


@pytest.mark.parametrize("name", PRE_TOKENISERS)
def test_no_pre_tokenizer_makes_a_text_longer_than_computed(name: str) -> None:
    pre_tokeniser = PRE_TOKENISERS[name]
    most = growth.pre_tokeniser_growth(described(pre_tokenizer=pre_tokeniser)["pre_tokenizer"])

    @given(TEXTS.filter(bool))
    def holds(text: str) -> None:
        assert sum(len(piece) for piece, _ in pre_tokeniser.pre_tokenize_str(text)) <= most * len(text)

    holds()


@pytest.mark.parametrize("name", DECODERS)
def test_no_decoder_makes_a_text_longer_than_computed(name: str) -> None:
    decoder = DECODERS[name]
    most = growth.decoder_growth(described(decoder=decoder)["decoder"])

    @given(st.lists(st.text("ab|<>/w#_▁é🙂", min_size=1, max_size=8), max_size=8))
    def holds(tokens: list[str]) -> None:
        assert len(decoder.decode(tokens)) <= most * sum(map(len, tokens))

    holds()


def test_every_kind_that_the_library_has_is_known() -> None:
    """A kind that a newer version brings is refused until somebody has looked at it."""
    for library, known in ((normalizers, NORMALISERS), (pre_tokenizers, PRE_TOKENISERS), (decoders, DECODERS)):
        kinds = {name for name in dir(library) if name[0].isupper() and not name.isupper()}
        others = {"Normalizer", "PreTokenizer", "Decoder", "DecodeStream", "Precompiled"}
        assert kinds - others <= {name.partition(",")[0] for name in known}


def replace(content: str, pattern: Any = "a") -> dict[str, Any]:
    return {
        "type": "Replace",
        "pattern": {"String": pattern} if isinstance(pattern, str) else pattern,
        "content": content,
    }


def test_it_is_the_product_of_replacements() -> None:
    assert growth.decoder_growth(None) == growth.decoder_growth({"type": "ByteLevel"}) == 1
    assert growth.decoder_growth(replace("", "abc")) == growth.decoder_growth(replace(" ", "\u2581")) == 1
    assert growth.decoder_growth(replace("abcdef", "ab")) == 3
    assert growth.decoder_growth(replace("ab", {"Regex": "x*"})) == 3
    nested = {"type": "Sequence", "decoders": [replace("aa"), {"type": "Sequence", "decoders": [replace("aaa")]}]}
    assert growth.decoder_growth(nested) == 6


def test_a_charsmap_counts_by_its_longest_replacement() -> None:
    charsmap = "BAAAAAAAAABhYWFhYWFhAGIA"  # a trie of four bytes, then "aaaaaaa" and "b"
    assert growth.normaliser_growth({"type": "Precompiled", "precompiled_charsmap": charsmap}) == 7


@pytest.mark.parametrize("function", [growth.normaliser_growth, growth.pre_tokeniser_growth, growth.decoder_growth])
def test_what_is_not_known_is_not_guessed(function: Any) -> None:
    with pytest.raises(UnknownPart, match="'Doubler' is not known"):
        function({"type": "Doubler"})


def test_added_tokens_are_counted() -> None:
    pair = [("a", 1), ("b", 2)]
    template = processors.TemplateProcessing(single="a $A b b", pair="a $A $B", special_tokens=pair)
    both = described(post_processor=processors.Sequence([template, processors.ByteLevel(), template]))
    assert growth.num_added(both["post_processor"]) == 6
    assert growth.num_added(described(post_processor=processors.BertProcessing(*pair))["post_processor"]) == 4
    twice = processors.TemplateProcessing(single="$A $A", special_tokens=[])
    assert growth.num_added(described(post_processor=twice)["post_processor"]) == math.inf
    with pytest.raises(UnknownPart):
        growth.num_added({"type": "Doubler"})


def test_expressions_are_found_in_nested_parts() -> None:
    assert not growth.has_expression({"type": "Sequence", "decoders": [replace("b"), {"type": "Fuse"}]})
    assert growth.has_expression({"type": "Sequence", "decoders": [replace("b", {"Regex": "a"})]})
