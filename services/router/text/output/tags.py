"""Lists the tags that mark parts of outputs, and gives each a mark for where it is a special token. Pure.

Special tokens are left out of text, also those that are tags. So that a parser learns of them and the client does not,
such a token becomes a mark in the text between the tokenizer and the parser: one character, half of a surrogate pair,
which no tokenizer's text has.
"""

from __future__ import annotations

TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
)
"""All tags. The first character of a tag does not occur in it again: a text that fails to be a tag is none up to where
it failed."""
MARKS = {tag: chr(0xDC00 + index) for index, tag in enumerate(TAGS)}
_NOTHING = dict.fromkeys(map(ord, MARKS.values()))


def without_marks(text: str) -> str:
    return text if text.isascii() else text.translate(_NOTHING)
