"""Checks a regular expression that outputs are to match, before a worker compiles it. Pure.

Owns: its size, how deep it is, and constructs that no worker serves, each refused by name. Never: the rest of its
grammar; the worker's library says what is wrong there.
"""

from __future__ import annotations

import re

from services.core.errors import InvalidRequest

MAX_REGEX_BYTES = 16 << 10
MAX_REGEX_LEVELS = 64
"""The most groups, or classes, that may be within one another."""
MAX_REGEX_REPEATS = 99_999
"""The largest number in braces."""

_LOOK_AROUND = {"(?=": "look-ahead", "(?!": "look-ahead", "(?<=": "look-behind", "(?<!": "look-behind"}
# What counts of an expression: escapes, the beginning of groups, brackets, large numbers of repetitions.
_PART = re.compile(r"\\(?:k<|.)|\(\?<?[=!]|[()\[\]]|\{(?:\d{1,5},)?\d{6}", re.DOTALL)


def check_regex(field: str, regex: str) -> None:
    """Raises InvalidRequest that names the field and what is not served."""
    num_bytes = len(regex) if regex.isascii() else len(regex.encode())
    if num_bytes > MAX_REGEX_BYTES:
        raise InvalidRequest(field, f"has {num_bytes} bytes; a regular expression has at most {MAX_REGEX_BYTES}")
    num_groups = num_classes = 0
    for found in _PART.finditer(regex):
        part = found[0]
        if part.startswith("\\"):
            if not num_classes:
                _check_escape(field, part)
        elif part == "[":
            num_classes += 1
        elif part == "]":
            num_classes = max(0, num_classes - 1)
        elif num_classes:
            continue
        elif part in _LOOK_AROUND:
            raise InvalidRequest(field, f"has {part}, a {_LOOK_AROUND[part]}, which is not served")
        elif part == "(":
            num_groups += 1
        elif part == ")":
            num_groups -= 1
        else:
            raise InvalidRequest(field, f"repeats more than {MAX_REGEX_REPEATS} times")
        if max(num_groups, num_classes) > MAX_REGEX_LEVELS:
            raise InvalidRequest(field, f"has more than {MAX_REGEX_LEVELS} levels of groups or classes")


def _check_escape(field: str, part: str) -> None:
    if part == "\\k<" or part[1] in "123456789":
        raise InvalidRequest(field, f"has {part}, a back reference, which is not served")
    if part[1] in "bB":
        raise InvalidRequest(field, f"has {part}, which looks at what is beside it (look-around) and is not served")
