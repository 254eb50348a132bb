"""Tests how text of others is made safe to be shown."""

from __future__ import annotations

import json
import sys
import unicodedata

from services.core.printable import printable, printable_json


def test_what_can_be_shown_stays() -> None:
    for text in ("plain text", "ünïcode ✓ █░ 日本語", "👩\u200d🚀 नमस्ते\u200d", "back\\slash"):
        assert printable(text) == text


def test_no_control_and_no_formatting_of_unicode_gets_through() -> None:
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\u200c\u200d":
            assert printable(f"a{character}b").isascii(), hex(number)
            assert printable(f"a{character}b").isprintable(), hex(number)


def test_what_is_to_be_kept_is_kept() -> None:
    assert printable("a\tb\nc\x1b[2J", keep="\n\t") == "a\tb\nc\\x1b[2J"


def test_json_is_as_safe_and_says_the_same() -> None:
    value = {"text": "a\x1b[2J\x9b\x7f\u202e\u2028\ud800 ünïcode 日本語 \U000e0001", "n": [1, None]}
    shown = printable_json(value)
    assert shown.isprintable()
    assert "ünïcode 日本語" in shown
    assert json.loads(shown) == value
