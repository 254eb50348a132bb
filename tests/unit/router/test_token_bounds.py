"""Characters a token can stand for: never fewer than it does; and no bound where there is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from services.router.text.token_bounds import TextBound, text_bound
from tests.support.text_model import byte_tokenizer

CORPUS = ["the baton is passed", "    indented    ", "aaaaaaaaaaaaaaaaaaaaaaaa", "e\u0301\u0302 ﬁ ﷺ 각"]


def bytes_with(normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def fallback() -> Tokenizer:
    """Returns a tokenizer like Llama 2's: characters, and bytes for those that are unknown."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for text in ("▁", "a", "b", "ab", "▁ab", "▁▁", "▁▁▁▁"):
        vocab[text] = len(vocab)
    merges = [("a", "b"), ("▁", "ab"), ("▁", "▁"), ("▁▁", "▁▁")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def bound(tokenizer: Tokenizer) -> TextBound | None:
    return text_bound(json.loads(tokenizer.to_str()))


BOUNDED = {
    "bytes": bytes_with(),
    "bytes, the tests' own": byte_tokenizer(),
    "composed": bytes_with(normalizers.NFC()),
    "composed, compatible": bytes_with(normalizers.NFKC()),
    "decomposed": bytes_with(normalizers.NFD()),
    "fallback": fallback(),
}
TEXTS = st.text(st.sampled_from("ab \n▁0\u0301\u0302\u0323ᄀ가각ἂ🙂ﷺﬁe") | st.characters(codec="utf-8"), max_size=200)


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_its_length_says(name: str) -> None:
    tokenizer, least = BOUNDED[name], bound(BOUNDED[name])
    assert least is not None

    @given(TEXTS)
    def holds(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert least.fewest_tokens(text) <= len(ids)

    holds()


def test_the_bound_is_met_by_the_longest_token() -> None:
    least = bound(bytes_with())
    assert least is not None
    assert least.fewest_tokens("a" * least.ascii_chars * 7) == 7
    assert least.fewest_tokens("") == 0


def _word_piece() -> Tokenizer:
    return Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))


def _with(**parts: Any) -> Tokenizer:
    tokenizer = bytes_with()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def _with_added(**flags: bool) -> Tokenizer:
    tokenizer = bytes_with()
    tokenizer.add_special_tokens([AddedToken("<mask>", **flags)])
    return tokenizer


UNBOUNDED = {
    "any word is one unknown token": (_word_piece(), "b" * 1000),
    "unknown ones in one": (Tokenizer(models.BPE({"[U]": 0, "a": 1}, [], unk_token="[U]", fuse_unk=True)), "b" * 1000),
    "unknown ones in none": (Tokenizer(models.BPE({"a": 1}, [])), "b" * 1000),
    "spaces beside an added token": (_with_added(lstrip=True), " " * 1000 + "<mask>"),
    "spaces are dropped": (_with(normalizer=normalizers.Strip()), " " * 1000 + "a"),
    "a pattern is dropped": (_with(normalizer=normalizers.Replace("aa", "")), "a" * 1000),
    "a separator is removed": (_with(pre_tokenizer=pre_tokenizers.CharDelimiterSplit(" ")), " " * 1000 + "a"),
    "punctuation is removed": (_with(pre_tokenizer=pre_tokenizers.Punctuation("removed")), "." * 1000),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_characters_may_vanish_there_is_no_bound(name: str) -> None:
    tokenizer, text = UNBOUNDED[name]
    assert len(tokenizer.encode(text).ids) < 10, "it is as its name says"
    assert bound(tokenizer) is None


def test_an_added_token_counts() -> None:
    tokenizer = bytes_with()
    tokenizer.add_special_tokens([AddedToken("<" + "x" * 98 + ">")])
    least = bound(tokenizer)
    assert least is not None
    assert least.ascii_chars == 100
