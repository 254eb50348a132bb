"""Makes text of unknown origin safe to show: nothing in it moves a cursor, hides a line or commands a terminal."""

from __future__ import annotations

import json
import unicodedata

_UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories that are escaped: controls, invisible formatting (including what reverses the direction of text),
surrogates, and separators of lines and paragraphs."""
_JOINERS = "\u200c\u200d"
"""Formatting characters that are kept, because letters and emoji are joined with them."""


def printable(text: str, keep: str = "") -> str:
    r"""Returns the text with every unsafe character, except those in `keep`, written as an escape such as \x1b."""
    if text.isprintable():
        return text
    return "".join(character if _is_safe(character, keep) else _escape(character) for character in text)


def printable_json(value: object) -> str:
    """Returns the value as JSON on one line, with every unsafe character written as JSON escapes it."""
    text = json.dumps(value, ensure_ascii=False)
    if text.isprintable():
        return text
    return "".join(each if _is_safe(each, "") else json.dumps(each)[1:-1] for each in text)


def _is_safe(character: str, keep: str) -> bool:
    return character in keep or character in _JOINERS or unicodedata.category(character) not in _UNSAFE


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
